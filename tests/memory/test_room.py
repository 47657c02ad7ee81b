"""Room for what is kept between questions: bounded, and what was not used for longest goes first."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

from dualform.memory.room import Room


def test_what_was_not_used_for_longest_goes_first() -> None:
    room = Room(30)
    made: list[str] = []

    def get(key: str, size: int = 10) -> str:
        return room.get(key, lambda: made.append(key) or key, lambda thing: size)

    for key in "abca":
        assert get(key) == key
    assert made == ["a", "b", "c"]
    get("d")
    assert room.used == 30
    assert [room.find(key) for key in "abcd"] == ["a", None, "c", "d"]
    get("huge", 1000)
    assert [room.find(key) for key in ("a", "c", "d", "huge")] == [None, None, None, "huge"]
    get("a")
    assert room.find("huge") is None and room.used == 10


def test_what_needs_another_thing_goes_with_it() -> None:
    room = Room(100)
    room.keep("shadow", 1, 50)
    room.keep("view", 2, 10, needs="shadow")
    room.keep("of a view", 3, 10, needs="view")
    room.keep("other", 4, 10)
    room.drop("shadow")
    assert room.used == 10 and room.find("other") == 4


def test_a_thing_is_made_once_for_all_threads() -> None:
    room, made = Room(100), []
    threads = [
        threading.Thread(target=lambda: room.get("a", lambda: made.append(1) or "a", lambda thing: 1)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_another_process_begins_empty() -> None:
    room = Room(100)
    room.keep("a", threading.Lock(), 1)  # which cannot be pickled
    copy = pickle.loads(pickle.dumps(room))
    assert copy.most == 100 and copy.used == 0


def test_who_asks_for_something_else_does_not_wait() -> None:
    room = Room(100)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go_on.wait(20)
        return "slow"

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(lambda: room.get("a", slow, len))
        assert begun.wait(20)
        assert room.get("b", lambda: "quick", len) == "quick"
        again = pool.submit(lambda: room.get("a", lambda: "made twice", len))
        go_on.set()
        assert (waiting.result(20), again.result(20)) == ("slow", "slow")


def test_what_needs_something_that_is_gone_is_not_kept() -> None:
    room = Room(100)
    assert room.get("view", lambda: "made", len, needs="shadow") == "made"
    assert room.find("view") is None
