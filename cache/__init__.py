"""Answering without a backend: rows that were answered before.

`key` says when two rows are the same question, `store` keeps answers in memory, `redis` where several gateways find
them, `cached` is the service around them. A cache failure is never a request's failure. What is stored is a copy, and
outlives its request.
"""
