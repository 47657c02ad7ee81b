"""Questions asked together: each is answered when the block is left, all of one weight in one pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, TypeVar, cast

from dualform.errors import BadCall, NotAnsweredYet
from dualform.memory import StoredMemory
from dualform.queries.plan import Plan, answer, run

T = TypeVar("T")
_open: ContextVar[tuple[Together, ...]] = ContextVar("open", default=())
_NOTHING = object()
_ALONE = (len, iter, bool, int, float, complex, hash, abs, format)
_OPERATORS = ("getitem", "contains", "index", "neg", "pos", "invert", "eq", "ne", "lt", "le", "gt", "ge")
_EITHER_WAY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")


class Pending:
    """Stands for an answer that is not there yet, and for the answer itself from then on."""

    def __init__(self, kind: type) -> None:
        self._kind, self._answer = kind, _NOTHING

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # So that it passes for the answer that it will be.
        return cast(type, object.__getattribute__(self, "_kind"))

    def __getattr__(self, name: str) -> Any:
        return getattr(_filled(self), name)

    def __repr__(self) -> str:
        if self._answer is _NOTHING:
            return f"<{self._kind.__name__}: answered when the together() block is left>"
        return repr(self._answer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _filled(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return function(*_all_filled(args), **_all_filled(kwargs or {}))


def _filled(pending: Any) -> Any:
    found = object.__getattribute__(pending, "_answer")
    if found is _NOTHING:
        kind = object.__getattribute__(pending, "_kind").__name__
        raise NotAnsweredYet(
            f"this {kind} is answered when the together() block is left without an error; read it then."
        )
    return found


def _all_filled(value: Any) -> Any:
    """A value in which every pending answer is replaced by the answer."""
    if type(value) is Pending:
        return _filled(value)
    if isinstance(value, Mapping):
        return {name: _all_filled(item) for name, item in value.items()}
    return type(value)(map(_all_filled, value)) if type(value) in (list, tuple) else value


def _applied(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*_all_filled(values))


def _turned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, other: function(*_all_filled((other, value)))


for _function in _ALONE:
    setattr(Pending, f"__{_function.__name__}__", _applied(_function))
for _name in (*_OPERATORS, *_EITHER_WAY):
    setattr(Pending, f"__{_name}__", _applied(getattr(operator, f"__{_name}__")))
for _name in _EITHER_WAY:
    setattr(Pending, f"__r{_name}__", _turned(getattr(operator, f"__{_name}__")))


class Together:
    """`with memory.together():` collects questions to one memory and answers them on leaving."""

    def __init__(self, memory: StoredMemory) -> None:
        self._memory = memory
        self._asked: list[tuple[Plan[Any], Pending]] = []
        self._token: Token[tuple[Together, ...]] | None = None

    def __enter__(self) -> None:
        if self._token is not None:
            raise BadCall(
                "this together() was entered before; write `with memory.together():` anew for more questions."
            )
        if any(other._memory is self._memory for other in _open.get()):
            raise BadCall("together() is open on this memory already: questions inside are asked together as it is.")
        self._token = _open.set((*_open.get(), self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        _open.reset(self._token)
        if kind is None:
            for (_, pending), found in zip(self._asked, run([plan for plan, _ in self._asked]), strict=True):
                pending._answer = found
        self._asked.clear()

    def add(self, plan: Plan[Any]) -> Pending:
        """Queue a question."""
        pending = Pending(plan.kind)
        self._asked.append((plan, pending))
        return pending


def ask(plan: Plan[T]) -> T:
    """Answer a question: now, or where its memory's together() is open when that is left."""
    for together in _open.get():
        if together._memory is plan.focus.memory:
            return cast(T, together.add(plan))
    return answer(plan)
