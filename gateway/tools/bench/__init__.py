"""Measurements that an operator can repeat: what a request costs here, beside what it costs elsewhere.

    proxy           the rounds and the figures: CPU time per request of whole proxies, side by side in one run
    stacks          the proxies: Headrace, nginx, HAProxy, and starlette with httpx for scale
    processes       how they are started, watched and ended
    exchanges       the requests that are sent, and the replies
    stub_*, load_*  the backend behind the proxies and the callers before them, each a process of its own

Only ratios within one run mean something: a machine that does other work as well is slower for all of them. Hence the
rounds: every stack has its turn in each, in a different order, so that a bad minute falls on all.
"""
