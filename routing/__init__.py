"""Which model answers, in what batch: cascades, confidence, dispatch.

What decides cannot wait: `lane`, `dispatcher` and `confidence` are synchronous, take `now` as an argument, and run
unchanged in a simulator. `dispatch` and `cascade` are the thin asynchronous shells around them.
"""
