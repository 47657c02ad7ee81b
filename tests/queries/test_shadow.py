"""The certified shadow: its bounds hold, and what it finds is what a scan of every event finds."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform import compiled, fast
from dualform.fast import LANES
from dualform.queries import best, cascade, coarse, examples, flat, pairs, search, weighing
from dualform.queries import shadow as shadows
from dualform.queries.best import best_events, suits, tame
from dualform.queries.hot import HotKeys
from dualform.queries.index import index_of
from dualform.queries.pairs import pair_products
from dualform.queries.reducers import Top, TopWithin
from dualform.queries.search import Search
from dualform.queries.selection import Grouping
from dualform.queries.shadow import SLACK, Asked, Shadow, build, row_norms
from dualform.queries.sieve import Sieve
from dualform.queries.spotlight import Attention
from dualform.queries.views import View

KINDS = [
    "relu", "gaussian", "normalised", "constant", "equal norms", "one huge", "zeros", "denormal", "wide range",
    "low rank", "repeated", "huge", "fp64 tiny", "whole numbers", "bf16", "fp16",
]  # fmt: skip


# Kinds whose products may leave the range of fp32, or of which too many are alike, so that a scan in fp64 answers.
OUT_OF_RANGE = ("denormal", "fp64 tiny", "constant", "huge", "one huge", "wide range")


def rows_of(kind: str, count: int, width: int, seed: int) -> Tensor:
    """Keys, some of them made to break a bound."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    if kind == "relu":
        x = (x + torch.randn(width, generator=generator)).relu()
    elif kind == "normalised":
        x = torch.nn.functional.normalize(x)
    elif kind == "constant":
        x = x[:1].expand(count, -1).clone()
    elif kind == "equal norms":
        x = x.sign()
    elif kind == "one huge":
        x[count // 2, width // 2] = 1e20
    elif kind == "zeros":
        x[::2] = 0.0
    elif kind == "denormal":
        x = x * 1e-41
    elif kind == "wide range":
        x = x * 10.0 ** torch.linspace(-30, 10, count)[:, None]
    elif kind == "low rank":
        x = x[:, :2] @ torch.randn(min(2, width), width, generator=generator)
    elif kind == "repeated":
        x = x[torch.randint(max(count // 4, 1), (count,), generator=generator)]
    elif kind == "huge":
        x = x * 1e30
    elif kind == "whole numbers":
        x = x.round()  # with whole queries scores tie, whatever the norms
    elif kind == "fp64 tiny":
        x = x.double() * 1e-200
    elif kind == "bf16":
        x = x.relu().bfloat16()
    elif kind == "fp16":
        x = x.half()
    return x


def shadow_of(rows: Tensor):
    return build(lambda: iter([(torch.arange(len(rows)), rows)]), len(rows), rows.shape[1])


def bounds_of(shadow: Shadow, units: Tensor) -> list[Tensor]:
    """Every bound of every pair, from coarse to fine."""
    asked = Asked.of(shadow, units, torch.ones(len(units), dtype=torch.float64), torch.linalg.vector_norm(units, dim=1))
    slack = SLACK * shadow.norms[:, None]
    head, coarse = torch.zeros(len(shadow), len(units)), []
    for level, with_ in zip(shadow.levels, asked.levels, strict=True):
        rows = level.transpose(1, 2).flatten(0, 1)[: len(shadow)]
        factors = torch.from_numpy(with_)
        head = head + rows[:, :-1] @ factors[:, :-1].T
        coarse.append(head + rows[:, -1:] * factors[:, -1] + slack)
    return [*coarse, shadow.fine @ torch.from_numpy(asked.fine).T]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3, 40, 200])
@pytest.mark.parametrize("module", [None, compiled])
def test_no_score_is_above_its_bound(kind: str, width: int, module: ModuleType | None) -> None:
    rows = rows_of(kind, 700, width, 1)
    near = rows_of(kind, 20, width, 1) + 0.01 * rows_of(kind, 20, width, 2)  # nearly parallel to some rows
    queries = torch.cat([rows_of("gaussian", 40, width, 3).to(rows.dtype), near]).double()
    norms = torch.linalg.vector_norm(queries, dim=1, keepdim=True)
    units = (queries / norms)[norms[:, 0] > 0]
    shadow = shadow_of(rows)
    order = shadow.numbers
    exact = (rows[order].double() / shadow.scale) @ units.T
    assert (shadow.norms[:-1] >= shadow.norms[1:]).all()
    assert (exact.abs() <= shadow.norms[:, None].double()).all()
    with loops(module):
        every = bounds_of(shadow, units)
    for bounds in every:
        assert (exact <= bounds.double()).all()


def test_a_bound_is_tight_where_the_keys_have_few_dimensions() -> None:
    rows = rows_of("low rank", 500, 60, 0)
    shadow = shadow_of(rows)
    units = torch.nn.functional.normalize(rows_of("gaussian", 10, 60, 1).double())
    bounds = bounds_of(shadow, units)[0]
    exact = (rows[shadow.numbers].double() / shadow.scale) @ units.T
    assert (bounds - exact).max() < 3e-4


def record(path: Path, keys: Tensor, out: int = 2, batches: int = 5, commits: int = 3, examples: int = 9) -> None:
    """A memory whose one layer saw these keys, with several segments."""
    torch.manual_seed(0)
    model = nn.Linear(keys.shape[1], out).to(keys.dtype)
    # Keys may be of any size: gradients that are independent of them, and steps too small to matter.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    labels = [i % 3 for i in range(examples)]
    recorder = dualform.record(model, optimizer, path, examples={"label": labels}, on_error="raise").start()
    parts = torch.arange(len(keys)).tensor_split(batches)
    for number, part in enumerate(parts):
        optimizer.zero_grad()
        with recorder.batch(part % examples):
            output = model(keys[part])
            output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(number)).to(output.dtype))
        optimizer.step()
        if number % max(batches // commits, 1) == 0:
            recorder.commit()
    recorder.close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds also for memories so small that a scan would do."""
    monkeypatch.setattr(best, "FEW", 1)
    monkeypatch.setattr(search, "SEED", 16)


@contextmanager
def always() -> Iterator[None]:
    """Bounds are used also where they do not pay."""
    with (
        mock.patch.object(Search, "_worth", return_value=1 << 40),
        mock.patch.object(cascade, "SPARE", 1 << 40),
        mock.patch.object(best, "MANY", 0),
    ):
        yield


@contextmanager
def loops(module: ModuleType | None) -> Iterator[None]:
    """These compiled loops, or none."""
    with ExitStack() as stack:
        for user in (cascade, shadows, best, flat, coarse, pairs):
            stack.enter_context(mock.patch.object(user, "compiled", return_value=module))
        yield


def same(attention, k: int, order: str, grouping: Grouping | None = None) -> bool:
    """The index and the scan say the same, bit for bit; whether the index answered."""
    focus, scorer = attention._focus, attention._scorer
    if not suits(focus.memory, focus.weight, k):
        return False
    norms = row_norms(scorer.queries)
    if not tame(norms):
        return False
    question = (focus.memory, focus.weight, focus.until, focus.selection, scorer, norms, k, order, grouping)
    with loops(None):
        found = best_events(*question)
    with loops(compiled):
        also = best_events(*question)
    answers = [one for one in (found, also) if one is not None]
    if not answers:
        return False
    reducer = Top(scorer, k, order) if grouping is None else TopWithin(scorer, k, order, grouping)
    focus.reduce(reducer)
    scores, numbers = reducer.result()
    for one in answers:
        assert one.scores.equal(scores) or one.scores.nan_to_num(7.0).equal(scores.nan_to_num(7.0))
        assert one.numbers.equal(numbers)
        assert one.nan == int(reducer.nan.sum())
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_the_index_finds_what_a_scan_finds(kind: str, order: str, tmp_path: Path) -> None:
    keys = rows_of(kind, 900, 24, 5)
    record(tmp_path / "run", keys)
    memory = dualform.open(tmp_path / "run")
    queries = torch.cat([rows_of("gaussian", 5, 24, 6).to(keys.dtype), keys[:4] * (1e30 if kind == "denormal" else 1)])
    queries = queries[queries.norm(dim=1) > 0]
    attention = memory.attend(None, {"": queries})[""]
    with always():
        answered = [
            same(attention, 7, order),
            same(attention.where(label=[0, 2]), 3, order),
            same(attention.where(step=slice(2, 4)), 5, order),
            same(memory.attend(None, {"": queries}, until=3)[""], 5, order),
            same(attention, 4, order, Grouping.by(memory, "label")),
        ]
    assert all(answered) or kind in ("denormal", "fp64 tiny", "constant")
    with mock.patch.object(Search, "_worth", return_value=0):
        scanned = same(attention, 7, order), same(attention.where(label=[0, 2]), 3, order)
    assert all(scanned) or kind in OUT_OF_RANGE
    if answered[0]:
        with always():
            assert attention.top(7, order=order).explain().startswith("certified shadow")


@pytest.mark.parametrize("kind", ["relu", "gaussian", "equal norms", "repeated"])
def test_several_threads_find_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast.torch, "get_num_threads", lambda: 3)
    for module in (cascade, pairs):
        monkeypatch.setattr(module, "PART", 64)
    monkeypatch.setattr(pairs, "MANY", 1)
    monkeypatch.setattr(pairs, "compiled", lambda work: compiled)
    monkeypatch.setattr(flat, "MOST", 256)
    keys = rows_of(kind, 3000, 24, 5)
    record(tmp_path / "run", keys)
    attention = dualform.open(tmp_path / "run").attend(None, {"": rows_of("gaussian", 40, 24, 6)})[""]
    parts = []
    whole = fast.in_parts

    def counted(*arguments, **settings):
        parts.append(len(result := whole(*arguments, **settings)))
        return result

    for module in (cascade, pairs):
        monkeypatch.setattr(module, "in_parts", counted)
    with always():
        for order in ("largest", "absolute"):
            assert same(attention, 7, order)
            assert same(attention.contributions(unit=1), 5, order)
    assert max(parts) == 3 * fast.TURNS
    with mock.patch.object(Search, "_worth", return_value=0):
        for order in ("largest", "smallest", "absolute"):
            assert same(attention, 7, order)


def test_views_that_several_threads_ask_for_at_once() -> None:
    shadow = shadow_of(rows_of("relu", 9000, 20, 0))
    view = View.of(shadow, torch.arange(len(shadow)) % 2 == 0)

    def ask(rows: int) -> bool:
        enough = len(view.levels(rows)[0]) * LANES >= min(rows, len(view)) and len(view.first(rows)) == rows
        view._made.clear()
        view._first.clear()
        return enough

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, [10, 4100, 50, 4400, 1000] * 20))


@pytest.mark.parametrize("kind", ["relu", "gaussian", "equal norms", "zeros", "repeated", "wide range"])
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_contributions_too(kind: str, order: str, tmp_path: Path) -> None:
    keys = rows_of(kind, 900, 24, 5)
    record(tmp_path / "run", keys)
    memory = dualform.open(tmp_path / "run")
    attention = memory.attend(None, {"": rows_of("gaussian", 6, 24, 6)})[""]
    with always():
        assert same(attention.contributions(unit=1), 7, order)
        assert same(attention.contributions(direction=[1.0, -0.3]), 4, order)
        assert same(attention.contributions(unit=torch.tensor([0, 1, 0, 1, 1, 0])), 4, order)
        assert same(attention.where(label=1).contributions(unit=0), 4, order)
        assert same(attention.contributions(unit=1), 3, order, Grouping.by(memory, "label"))
        assert same(attention.contributions(), 5, order) or order == "smallest"


def test_keys_that_are_not_finite_are_set_apart(tmp_path: Path) -> None:
    keys = rows_of("relu", 900, 24, 5)
    keys[3, 2], keys[100, 1], keys[200] = torch.nan, torch.inf, -torch.inf
    record(tmp_path / "run", keys)
    memory = dualform.open(tmp_path / "run")
    attention = memory.attend(None, {"": rows_of("gaussian", 6, 24, 6)})[""]
    with always():
        for order in ("largest", "smallest", "absolute"):
            assert same(attention, 7, order)
            assert same(attention, 3, order, Grouping.by(memory, "label"))
    with mock.patch.object(Search, "run", return_value=False):
        for order in ("largest", "smallest", "absolute"):
            assert same(attention, 7, order)
            assert attention.top(7, order=order).explain().startswith("flat scan")


@hypothesis.given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 600),
    width=st.integers(1, 40),
    k=st.integers(1, 30),
    queries=st.integers(1, 20),
    order=st.sampled_from(["largest", "smallest", "absolute"]),
    seed=st.integers(0, 1000),
    pays=st.booleans(),
    contributed=st.booleans(),
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=60)
def test_whatever_the_keys(
    kind: str, count: int, width: int, k: int, queries: int, order: str, seed: int, pays: bool, contributed: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    keys = rows_of(kind, count, width, seed)
    path = tmp_path_factory.mktemp("run")
    record(path, keys, batches=min(4, count))
    memory = dualform.open(path)
    asked = rows_of("gaussian", queries, width, seed + 1).to(keys.dtype)
    attention: Attention = memory.attend(None, {"": asked})[""]
    with always() if pays else mock.patch.object(cascade, "TILE", 512):
        same(attention.contributions(unit=0) if contributed else attention, k, order)
    with mock.patch.object(Search, "_worth", return_value=0):
        same(attention, k, order)


def test_a_growing_memory_extends_its_shadow(tmp_path: Path) -> None:
    path = tmp_path / "run"
    torch.manual_seed(0)
    model = nn.Linear(12, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path) as recorder:
        names: list[set[str]] = []
        for _ in range(6):
            for _ in range(3):
                with recorder.batch(torch.arange(50)):
                    model(torch.randn(50, 12)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder.commit()
            memory = dualform.open(path)
            with always():
                assert same(memory.attend(None, {"": torch.randn(3, 12)})[""], 5, "largest")
            names.append({file.name for file in (path / "derived/shadow").iterdir()})
    assert names[0] == {"w0-000000-000001.safetensors"}
    assert names[1] == {"w0-000000-000002.safetensors"}  # as large as the first: taken in
    assert names[2] == {"w0-000000-000002.safetensors", "w0-000002-000003.safetensors"}
    assert names[5] == {"w0-000000-000004.safetensors", "w0-000004-000006.safetensors"}


def test_a_damaged_or_stale_shadow_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, rows_of("relu", 400, 8, 0))
    memory = dualform.open(path)
    with always():
        assert same(memory.attend(None, {"": torch.ones(1, 8)})[""], 5, "largest")
        (file,) = (path / "derived/shadow").iterdir()
        whole = file.read_bytes()
        file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        memory = dualform.open(path)
        assert same(memory.attend(None, {"": torch.ones(1, 8)})[""], 5, "largest")
        assert file.read_bytes() == whole
        record(tmp_path / "other", rows_of("relu", 400, 8, 1))
        other = dualform.open(tmp_path / "other")
        (tmp_path / "other/derived/shadow").mkdir(parents=True)
        (tmp_path / "other/derived/shadow" / file.name).write_bytes(whole)
        assert same(other.attend(None, {"": torch.ones(1, 8)})[""], 5, "largest")


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
def test_the_best_examples_are_those_of_the_sums(order: str, tmp_path: Path) -> None:
    keys = rows_of("relu", 900, 24, 5)
    record(tmp_path / "run", keys, examples=150)
    memory = dualform.open(tmp_path / "run")
    queries = rows_of("gaussian", 6, 24, 6)
    attention = memory.attend(None, {"": queries})[""]
    chosen = attention.where(label=[0, 2])
    sums = torch.zeros(150, 24, dtype=torch.float64).index_add_(0, torch.arange(900) % 150, keys.double())
    scores = queries.double() @ sums.T
    with always():
        for asked, of in ((attention, torch.ones(150, dtype=torch.bool)), (chosen, torch.arange(150) % 3 != 1)):
            answer = asked.top(5, by="example", order=order)
            assert "shadow" in answer.explain()
            rank = {"largest": scores, "smallest": -scores, "absolute": scores.abs()}[order]
            expected = rank.where(of, -torch.inf).topk(5, dim=1).indices
            assert torch.tensor(answer.groups).equal(expected)
            assert (answer.scores - scores.gather(1, expected)).abs().max() <= 1e-12 * scores.abs().max()
            assert (answer.counts == 6).all()


def test_sums_that_come_out_otherwise_when_formed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def another_order(*arguments):
        found = pair_products(*arguments)
        return found * (1 + 1e-15 * torch.randint(-1, 2, found.shape, generator=generator).double())

    record(tmp_path / "run", rows_of("relu", 6000, 24, 5), examples=600)
    memory = dualform.open(tmp_path / "run")
    attention = memory.attend(None, {"": rows_of("gaussian", 60, 24, 6)})[""]
    with always():
        expected = attention.top(5, by="example")
        assert "shadow" in expected.explain()
        monkeypatch.setattr(examples, "pair_products", another_order)
        monkeypatch.setattr(search, "SEED", 600)  # the first thresholds are the best of all
        for _ in range(5):
            assert attention.top(5, by="example").groups == expected.groups


@pytest.mark.parametrize("measure", ["scores", "contributions"])
def test_a_group_of_which_nothing_is_left(tmp_path: Path, measure: str) -> None:
    record(tmp_path / "run", rows_of("relu", 900, 12, 5))
    attention = dualform.open(tmp_path / "run").attend(None, {"": rows_of("gaussian", 3, 12, 6)})[""]
    asked = attention if measure == "scores" else attention.contributions(unit=1)
    with always():
        found = asked.where(label=1).top(4, within="label")
        assert "shadow" in found.explain()
    assert found.groups is not None and list(found.groups) == [0, 1, 2]
    assert bool((found.events[:, [0, 2]] == -1).all()) and bool(found.scores[:, [0, 2]].isnan().all())
    assert torch.equal(found.events[:, 1], asked.where(label=1).top(4).events)


@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("k", [1, 7, 40])
def test_ties_are_decided_by_event(order: str, k: int, tmp_path: Path) -> None:
    """Scores that are equal although the norms differ: the search meets them in another order than the events'."""
    keys = rows_of("whole numbers", 2000, 6, 5)
    record(tmp_path / "run", keys)
    queries = rows_of("whole numbers", 30, 6, 6)
    attention = dualform.open(tmp_path / "run").attend(None, {"": queries[queries.any(dim=1)]})[""]
    with always():
        assert same(attention, k, order)
        assert same(attention.contributions(unit=1), k, order)
    with mock.patch.object(Search, "_worth", return_value=0):
        assert same(attention, k, order)


def test_keys_at_hand_stay_what_they_are_while_others_come_and_go(tmp_path: Path) -> None:
    keys = rows_of("relu", 3000, 24, 5)
    record(tmp_path / "run", keys)
    memory = dualform.open(tmp_path / "run")
    hot = HotKeys(memory, 0, torch.linalg.vector_norm(keys, dim=1), 0)  # room for few
    hot.fix(torch.arange(40), keys[:40])
    held, slots = map(torch.from_numpy, hot.at_hand())

    def sound() -> bool:
        there = ((slots >= 0) & (slots < len(held))).nonzero()[:, 0]
        return len(there) >= 40 and held[slots[there].long()].equal(keys[there])

    for start in range(40, 3000, 90):  # more than there is room for: what was read goes, and other keys take its place
        assert hot.get(torch.arange(start, min(start + 90, 3000))) is not None
        assert sound()
    now, places = map(torch.from_numpy, hot.at_hand())
    there = (places >= 0).nonzero()[:, 0]
    assert now.data_ptr() != held.data_ptr() and now[places[there].long()].equal(keys[there])
    assert hot.complete
    hot.fix(torch.arange(40, 3000), keys[40:])
    assert not hot.complete


def test_products_of_keys_at_hand_are_what_the_search_goes_by(tmp_path: Path) -> None:
    """With them far fewer pairs are left to score one by one, and as many rows are bounded as with exact thresholds."""
    record(tmp_path / "run", rows_of("relu", 4000, 40, 5), batches=2, commits=1)
    memory = dualform.open(tmp_path / "run")
    attention = memory.attend(None, {"": rows_of("relu", 50, 40, 6)})[""]
    left = []
    counted = cascade.survivors

    def watched(*arguments, **settings):
        left.append(counted(*arguments, **settings))
        return left[-1]

    with always(), mock.patch.object(search, "survivors", watched):
        assert same(attention, 7, "largest")
    plain, fast = left
    assert plain.scored == 0 and fast.scored >= 7 * 50
    assert 7 * 50 <= len(fast.at_row) < 9 * 50 < len(plain.at_row)


@pytest.mark.parametrize("k", [1, 7, 60])
@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_and_queries(k: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than queries stay in one order for, more queries than a tile has, and ties."""
    monkeypatch.setattr(search, "SEED", 1024)
    monkeypatch.setattr(fast.torch, "get_num_threads", lambda: threads)
    keys = torch.cat([rows_of("whole numbers", 20_000, 5, 1), rows_of("relu", 20_000, 5, 2)])
    record(tmp_path / "run", keys, batches=2, commits=1)
    queries = rows_of("whole numbers", 300, 5, 3)
    attention = dualform.open(tmp_path / "run").attend(None, {"": queries[queries.any(dim=1)]})[""]
    with always():
        assert same(attention, k, "largest")
        assert same(attention[:40].where(label=[0, 2]), k, "absolute")
        assert same(attention[:40].contributions(unit=1), k, "smallest")
        with mock.patch.object(cascade.Near, "__len__", return_value=0):  # nothing at hand
            assert same(attention, k, "largest")


ODD_SIZES = {
    "small keys, large queries": (1e-3, 1e36),
    "large keys, small queries in fp64": (1e30, 1e-50),
    "small keys, queries beyond fp32": (1e-6, 1e40),
    "keys whose norm is beyond fp32": (1e38, 1.0),
    "scores that are zero in fp32": (1e-20, 1e-40),
}


@pytest.mark.parametrize("name", ODD_SIZES)
@pytest.mark.parametrize("order", ["largest", "smallest", "absolute"])
@pytest.mark.parametrize("pays", [True, False])
def test_sizes_at_the_borders_of_fp32(name: str, order: str, pays: bool, tmp_path: Path) -> None:
    of_keys, of_queries = ODD_SIZES[name]
    keys = rows_of("gaussian", 900, 64, 5).clamp(-3, 3) * of_keys
    record(tmp_path / "run", keys)
    memory = dualform.open(tmp_path / "run")
    queries = rows_of("gaussian", 6, 64, 6).double() * of_queries
    for asked in (queries, queries[:1], queries.float()):
        if not asked.isfinite().all() or not asked.any(dim=1).all():
            continue
        attention = memory.attend(None, {"": asked})[""]
        with always() if pays else mock.patch.object(Search, "_worth", return_value=0):
            same(attention, 7, order)
            same(attention.contributions(unit=1), 7, order)


def test_a_run_that_is_resumed_inside_a_segment_gets_another_index(tmp_path: Path) -> None:
    path, keys = tmp_path / "run", rows_of("gaussian", 1000, 12, 0)

    def train(start: int, stop: int, resume_at: int | None) -> None:
        torch.manual_seed(0)
        model = nn.Linear(12, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with dualform.record(model, optimizer, path, resume_at=resume_at) as recorder:
            for part in keys.split(100)[start:stop]:
                with recorder.batch(torch.arange(len(part))):
                    model(part).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    def ask(events: int) -> None:
        memory = dualform.open(path)
        attention = memory.attend(None, {"": rows_of("gaussian", 3, 12, 9)})[""]
        assert len(index_of(memory).table(0)) == events
        with always():
            assert same(attention, 5, "largest")
        with mock.patch.object(Search, "_worth", return_value=0):
            assert same(attention, 5, "largest")

    train(0, 5, None)
    ask(500)
    train(7, 8, 2)  # other keys than those that were dropped
    ask(300)
    train(5, 10, 2)
    ask(700)


def test_a_scan_that_leaves_too_much_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = rows_of("gaussian", 900, 24, 5) * 1e-4 + 1.0  # alike in bytes
    record(tmp_path / "run", keys)
    attention = dualform.open(tmp_path / "run").attend(None, {"": rows_of("gaussian", 8, 24, 6)})[""]
    monkeypatch.setattr(flat, "MANY_LEFT", 1000)
    monkeypatch.setattr(flat, "LEAST", 128)
    monkeypatch.setattr(flat, "MOST", 128)
    # One after the other: a second thread may have begun a piece before the first one's refusal.
    monkeypatch.setattr(flat, "spread", lambda work, pieces: [work(piece) for piece in pieces])
    scans, taken = [], []
    whole, take = flat.scan, Sieve.take

    def counted(*arguments):
        scans.append(whole(*arguments))
        taken.append(None)
        return scans[-1]

    def noted(*arguments):
        taken.append(take(*arguments))
        return taken[-1]

    with (
        mock.patch.object(Search, "_worth", return_value=0),
        mock.patch.object(weighing, "scan", counted),
        mock.patch.object(Sieve, "take", noted),
    ):
        assert same(attention, 7, "largest")
    assert scans == [False, True] * 2
    # After the first refusal nothing more is taken in.
    assert [after for before, after in itertools.pairwise(taken) if before is False] == [None, None]
