"""Tools for people and measurements: what may import heavy libraries, and what serving never needs."""
