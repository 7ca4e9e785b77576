"""Traces of the whole stack: every hop, shared batches, and what is not recorded."""

from __future__ import annotations

import asyncio

from tests.unit.gateway.test_stack import body, post, rig


def test_a_trace_shows_every_hop_and_a_shared_batch_shows_in_both_traces() -> None:
    async def run() -> None:
        r = rig()
        ids = ["1" * 32, "2" * 32]
        async with r.client() as client:
            await asyncio.gather(
                *(
                    post(client, "sure", body([0.5]), headers={"traceparent": f"00-{i}-00f067aa0ba902b7-01"})
                    for i in ids
                )
            )
        assert len(r.server.requests) == 2
        assert all("traceparent" in request.headers for request in r.server.requests)
        for trace_id in ids:
            spans = r.tracing.recent.trace(trace_id)
            names = [span["name"] for span in spans]
            assert names.count("batch") == 2
            assert {"tier small", "tier large", "dispatch", "POST /v2/models/{model}/infer"} <= set(names)
            called = [span["attributes"]["headrace.model"] for span in spans if span["kind"] == "client"]
            assert called == ["small", "large"]
            known = {span["span_id"] for span in spans}
            roots = [span for span in spans if span["parent_id"] not in known]
            assert [(span["name"], span["kind"]) for span in roots] == [("POST /v2/models/{model}/infer", "server")]

    asyncio.run(run())


def test_unsampled_requests_are_not_recorded_beyond_the_allowance() -> None:
    async def run() -> None:
        r = rig()
        r.tracing.per_second = 0.0
        async with r.client() as client:
            await post(client, "twice", body([1.0]))
            assert r.tracing.recent.ids() == []
            trace_id = "3" * 32
            await post(client, "twice", body([1.0]), headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"})
        assert r.tracing.recent.ids() == [trace_id]

    asyncio.run(run())
