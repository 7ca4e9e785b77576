"""Which model answers, in what batch, on which replica: cascades, confidence, dispatch, retries, fallbacks.

What decides cannot wait: `lane`, `dispatcher`, `retry`, `sequence` and `confidence` are synchronous, take `now` as an
argument, and run unchanged in a simulator. `dispatch`, `balancer`, `sticky`, `cascade`, `whole` and `fallback` are the
thin asynchronous shells around them.
"""
