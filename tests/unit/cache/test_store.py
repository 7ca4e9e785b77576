import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cache.store import MemoryStore

OVERHEAD = 200


def store(entries: int = 100, size: int = 10**6) -> MemoryStore:
    return MemoryStore(entries, size, lambda: 0.0)


def put(kept: MemoryStore, **values: bytes) -> None:
    asyncio.run(kept.put_many({name.encode(): value for name, value in values.items()}, 60.0))


def got(kept: MemoryStore, names: str) -> list[bytes | None]:
    return asyncio.run(kept.get_many([name.encode() for name in names]))


def test_the_least_recently_used_goes_first() -> None:
    kept = store(entries=3)
    put(kept, a=b"1", b=b"2", c=b"3")
    got(kept, "a")
    put(kept, b=b"4")
    put(kept, d=b"5")
    assert got(kept, "abcd") == [b"1", b"4", None, b"5"]
    assert len(kept) == 3


def test_bytes_are_bounded() -> None:
    kept = store(size=2 * (OVERHEAD + 100))
    put(kept, a=bytes(100), b=bytes(100))
    assert kept.bytes == 2 * (OVERHEAD + 100)
    put(kept, c=b"x")
    assert got(kept, "abc") == [None, bytes(100), b"x"]
    assert kept.bytes == 2 * OVERHEAD + 101


def test_what_is_larger_than_everything_is_not_kept_and_drives_nobody_out() -> None:
    kept = store(size=1000)
    put(kept, a=b"old", b=b"2")
    put(kept, a=bytes(1000))
    assert got(kept, "ab") == [None, b"2"], "nor does the value stay that it was to replace"


def test_a_store_without_room_keeps_nothing() -> None:
    for kept in (store(entries=0), store(size=0)):
        put(kept, a=b"1")
        assert got(kept, "a") == [None]
        assert (len(kept), kept.bytes) == (0, 0)


def test_what_has_ended_frees_its_room_when_it_is_asked_for() -> None:
    now = [0.0]
    kept = MemoryStore(10, 10**6, lambda: now[0])
    asyncio.run(kept.put_many({b"a": b"1"}, 5.0))
    now[0] = 4.999
    assert got(kept, "a") == [b"1"]
    now[0] = 5.0
    assert got(kept, "a") == [None]
    assert (len(kept), kept.bytes) == (0, 0)


@given(
    st.lists(
        st.tuples(st.just("put"), st.sampled_from("abcdef"), st.integers(0, 400))
        | st.tuples(st.just("get"), st.sampled_from("abcdef"), st.just(0))
        | st.tuples(st.just("wait"), st.just(""), st.integers(1, 30)),
        max_size=40,
    )
)
def test_bounds_hold_and_what_is_found_was_put(script: list[tuple[str, str, int]]) -> None:
    async def main() -> None:
        now = 0.0
        kept = MemoryStore(4, 1500, lambda: now)
        last: dict[bytes, tuple[float, bytes]] = {}
        for i, (what, name, number) in enumerate(script):
            key = name.encode()
            if what == "put":
                value = i.to_bytes(4, "little") + bytes(number)
                await kept.put_many({key: value}, 40.0)
                last[key] = (now + 40.0, value)
            elif what == "get":
                (value_or_none,) = await kept.get_many([key])
                if value_or_none is not None:
                    assert last[key][0] > now
                    assert last[key][1] == value_or_none
            else:
                now += number
            assert len(kept) <= 4
            assert kept.bytes <= 1500
        await kept.get_many([name.encode() for name in "abcdef"])

    asyncio.run(main())
