"""What it takes to run Headrace somewhere: the demo, containers, dashboards."""
