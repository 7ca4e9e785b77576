"""What worker 0 answers for all workers: it asks each over its Unix socket, itself too, and joins what they say.

No answer within a time, or a defect, is a 504 of that worker's like any other answer, and is told: in place of what it
would have said, or in the header `headrace-incomplete`. A policy is put in force by all workers or by none. All are
asked first whether they answer; then each decides by itself, and has as long as its models may take to load. Where one
refuses, or is silent after all, those that took it roll back, and the refusal is the answer. What cannot be undone is
told under `left`: a worker that does not roll back, and one that was silent, which may still take the policy (GET
/policy shows the versions in force). A rollback cannot be undone, so that all are asked first whether the policy before
theirs is the same one; where one fails all the same, `left` says what each has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from gateway.workers import Worker

# A page takes a worker milliseconds; one that is busy with a large request, a fraction of a second.
_PATIENCE_SECONDS = 2.0
# A minute is what gateway/reload.py gives a model to load, and once more where the worker is at another edit already.
_APPLY_SECONDS = 130.0


class Said(NamedTuple):
    """An answer: a status, a value for JSON, and the reasons why it is not all workers'."""

    status: int
    value: Any
    missing: tuple[str, ...] = ()


def clients(worker: Worker) -> list[httpx.AsyncClient]:
    """A client of each worker's own admin application and metrics page."""
    sockets = [str(worker.socket_of(index)) for index in range(worker.count)]
    return [
        httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://worker") for path in sockets
    ]


class Joined:
    """The answers of all workers; `workers` are clients of their own admin applications, by index."""

    def __init__(self, workers: Sequence[httpx.AsyncClient], patience: float = _PATIENCE_SECONDS) -> None:
        self._workers = workers
        self._patience = patience
        self._changing = asyncio.Lock()

    async def close(self) -> None:
        for worker in self._workers:
            await worker.aclose()

    async def ready(self) -> bool:
        """Whether any worker is; known as soon as the first one says so."""
        asking = [asyncio.ensure_future(self._ask(i, "GET", "/readyz")) for i in range(len(self._workers))]
        try:
            for answer in asyncio.as_completed(asking):
                if (await answer).status_code == 200:
                    return True
            return False
        finally:
            for task in asking:
                task.cancel()

    async def metrics(self) -> bytes:
        answers = await self._ask_all("GET", "/metrics")
        return join_metrics([a.content.decode() if a.status_code == 200 else None for a in answers]).encode()

    async def backends(self) -> Said:
        answers = await self._ask_all("GET", "/backends")
        return _joined(answers, join_backends([a.json() if a.status_code == 200 else _error(a) for a in answers]))

    async def cache(self) -> Said:
        answers = await self._ask_all("GET", "/cache")
        return _joined(answers, join_cache([a.json() if a.status_code == 200 else _error(a) for a in answers]))

    async def policy(self) -> Said:
        answers = await self._ask_all("GET", "/policy")
        versions = [a.json()["version"] if a.status_code == 200 else _error(a) for a in answers]
        own = answers[0].json()
        return _joined(answers, {**own, "workers": versions}) if answers[0].status_code == 200 else _told(answers[0])

    async def apply(self, text: bytes, options: Mapping[str, str]) -> Said:
        async with self._changing:
            # Who is silent already is not waited for, and leaves nothing to undo.
            refusal = _refusal(await self._ask_all("GET", "/livez"))
            if refusal is not None:
                return _told(refusal)
            answers = await self._ask_all("POST", "/policy", _APPLY_SECONDS, content=text, params=dict(options))
            refusal = _refusal(answers)
            if refusal is None:
                return _told(answers[0])
            taken = {
                i: a.json()["version"] for i, a in enumerate(answers) if a.headers.get("headrace-changed") == "true"
            }
            back = await asyncio.gather(*(self._ask(i, "POST", "/policy/rollback", _APPLY_SECONDS) for i in taken))
            left = [_unsure(answer) for answer in answers if answer.status_code == 504]
            left += [
                _kept(i, taken[i], answer) for i, answer in zip(taken, back, strict=True) if answer.status_code != 200
            ]
            return _told(refusal, left)

    async def rollback(self) -> Said:
        async with self._changing:
            answers = await self._ask_all("GET", "/policy")
            refusal = _refusal(answers)
            if refusal is not None:
                return _told(refusal)
            before = [answer.json()["history"][-1:] for answer in answers]
            if any(each != before[0] for each in before):
                known = ", ".join(f"worker {i}: {''.join(each) or 'none'}" for i, each in enumerate(before))
                return Said(409, {"error": f"the workers have no common earlier policy ({known})"})
            now = [answer.json()["version"] for answer in answers]
            answers = await self._ask_all("POST", "/policy/rollback", _APPLY_SECONDS)
            refusal = _refusal(answers)
            if refusal is None:
                return _told(answers[0])
            return _told(
                refusal,
                [
                    f"worker {i}: has {answer.json()['version']}"
                    if answer.status_code == 200
                    else _kept(i, now[i], answer)
                    for i, answer in enumerate(answers)
                ],
            )

    async def traces(self) -> Said:
        answers, ended = await self._ended()
        return _joined(answers, [trace for _, trace, _ in ended])

    async def trace(self, wanted: str) -> Said:
        """One trace of the first worker that has it; `last` is the one that ended last of all."""
        if wanted == "last":
            answers, ended = await self._ended()
            if ended:
                _, wanted, index = ended[0]
                return _told(await self._ask(index, "GET", f"/traces/{wanted}"))
            return _told(_refusal(answers) or await self._ask(0, "GET", "/traces/last"))
        answers = await self._ask_all("GET", f"/traces/{wanted}")
        # One that is silent may have it: that is to be told rather than that there is none.
        return _told(min(answers, key=lambda answer: (answer.status_code != 200, answer.status_code == 404)))

    async def _ended(self) -> tuple[list[httpx.Response], list[tuple[int, str, int]]]:
        """When each recent trace ended (ns), its id and its worker; the most recent first."""
        answers = await self._ask_all("GET", "/traces", params={"ended": "true"})
        known = [
            (row["end_unix_ns"], row["trace_id"], index)
            for index, answer in enumerate(answers)
            if answer.status_code == 200
            for row in answer.json()
        ]
        latest = {trace: (end, trace, index) for end, trace, index in sorted(known)}
        return answers, sorted(latest.values(), reverse=True)

    async def _ask_all(
        self, method: str, path: str, patience: float | None = None, **more: Any
    ) -> list[httpx.Response]:
        asking = (self._ask(index, method, path, patience, **more) for index in range(len(self._workers)))
        return await asyncio.gather(*asking)

    async def _ask(
        self, index: int, method: str, path: str, patience: float | None = None, **more: Any
    ) -> httpx.Response:
        seconds = patience or self._patience
        try:
            async with asyncio.timeout(seconds):
                answer = await self._workers[index].request(method, path, timeout=None, **more)
            if answer.status_code != 500:
                return answer
            reason = f"worker {index}: internal error"
        except TimeoutError:
            reason = f"worker {index}: no answer within {seconds:g} s"
        except httpx.HTTPError as error:
            reason = f"worker {index}: no answer ({error or type(error).__name__})"
        return httpx.Response(504, json={"error": reason})


def join_metrics(pages: Sequence[str | None]) -> str:
    """One page of all workers' (None: no answer), each sample with the label `worker`; HELP and TYPE once."""
    heads: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for index, page in enumerate(pages):
        family = ""
        for line in (page or "").split("\n"):
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                heads.setdefault(family, {})[line] = None
            elif line:
                samples.setdefault(family, []).append(_labelled(line, index))
    up = [f'headrace_worker_up{{worker="{index}"}} {float(page is not None)}' for index, page in enumerate(pages)]
    lines = [
        "# HELP headrace_worker_up 1 where the worker's samples are on this page",
        "# TYPE headrace_worker_up gauge",
    ]
    return "\n".join(
        [*lines, *up, *(line for name, head in heads.items() for line in [*head, *samples.get(name, ())]), ""]
    )


def _labelled(sample: str, worker: int) -> str:
    """A line of the text format with one label more; a metric's name holds neither a space nor a brace."""
    head, brace, rest = sample.partition("{")
    if not brace or " " in head:
        name, _, value = sample.partition(" ")
        return f'{name}{{worker="{worker}"}} {value}'
    return f'{head}{{worker="{worker}"{"" if rest.startswith("}") else ","}{rest}'


def join_backends(pages: Sequence[Mapping[str, Any] | str]) -> dict[str, Any]:
    """One page of all workers' (a text: why there is none): sums; ready only where all say so, else the first reason.

    What one avoids is avoided, for each finds out for itself. Who does not answer does not say so either.
    """
    joined: dict[str, Any] = {}
    for page in pages:
        for name, backend in page.items() if not isinstance(page, str) else ():
            known = joined.setdefault(name, {"endpoints": []})
            by_name = {endpoint["name"]: endpoint for endpoint in known["endpoints"]}
            for endpoint in backend["endpoints"]:
                before = by_name.get(endpoint["name"])
                if before is None:
                    known["endpoints"].append(dict(endpoint))
                    continue
                before["in_flight"] += endpoint["in_flight"]
                before["avoided"] = {**endpoint["avoided"], **before["avoided"]}
                if before["ready"] is True:
                    before["ready"], before["reason"] = endpoint["ready"], endpoint["reason"]
            if "queue" in backend:
                queue = known.setdefault("queue", dict.fromkeys(backend["queue"], 0))
                for key, value in backend["queue"].items():
                    queue[key] = queue.get(key, 0) + value
    silent = next((page for page in pages if isinstance(page, str)), "")
    for backend in joined.values() if silent else ():
        for endpoint in backend["endpoints"]:
            if endpoint["ready"] is True:
                endpoint["ready"], endpoint["reason"] = False, silent
    return joined


def join_cache(pages: Sequence[Mapping[str, Any] | str]) -> dict[str, Any]:
    """One page of all workers' (a text: why there is none): up only where all say so, else the first reason; a sum."""
    stores = [page["redis"] for page in pages if not isinstance(page, str) and "redis" in page]
    if not stores:
        return {}
    # Worst first: one that is not up, then one that refuses writes.
    joined = dict(min(stores, key=lambda store: (store["up"] is True, not store["reason"])))
    silent = next((page for page in pages if isinstance(page, str)), "")
    if silent and joined["up"] is True:
        joined["up"], joined["reason"] = False, silent
    return {"redis": {**joined, "dropped_rows": sum(store["dropped_rows"] for store in stores)}}


def _refusal(answers: Sequence[httpx.Response]) -> httpx.Response | None:
    """The first answer that is no success; one that says why before one that is only silent."""
    refused = [answer for answer in answers if answer.status_code != 200]
    return min(refused, key=lambda answer: answer.status_code == 504, default=None)


def _joined(answers: Sequence[httpx.Response], value: Any) -> Said:
    """`value`, and who is missing in it; or why there is none, where nobody answered."""
    missing = tuple(_error(answer) for answer in answers if answer.status_code != 200)
    return Said(200, value, missing) if len(missing) < len(answers) else _told(answers[0])


def _told(answer: httpx.Response, left: Sequence[str] = ()) -> Said:
    return Said(answer.status_code, {**answer.json(), "left": left} if left else answer.json())


def _unsure(answer: httpx.Response) -> str:
    return f"{_error(answer)}; it may do so yet"


def _kept(index: int, version: str, answer: httpx.Response) -> str:
    """What a worker has that was to roll back from `version`, and did not say that it has."""
    return _unsure(answer) if answer.status_code == 504 else f"worker {index}: keeps {version}: {_error(answer)}"


def _error(answer: httpx.Response) -> str:
    return str(answer.json()["error"])
