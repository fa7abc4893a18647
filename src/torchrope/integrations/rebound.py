"""`Rebound`: a method of another library's object in which global names refer to something else."""

import inspect
from operator import is_not
from types import FunctionType
from typing import Any

import torch


class Rebound:
    """Calls a method of an object with stand-ins for some of the global names that its code uses.

    Others may replace functions in the method's module at any time: other names follow the module, and a stand-in's
    attribute `replaced` is what its name refers to there.
    """

    def __init__(self, owner: Any, method: str, stand_ins: dict[str, Any]) -> None:
        self.owner = owner
        self.method = method
        self.stand_ins = stand_ins
        self._original = undecorated(owner, method)
        self._function = with_globals(self._original, stand_ins)
        self._names = names_in(owner, method)
        self._module = self._original.__globals__
        self._follow()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and any(map(is_not, map(self._module.get, self._names), self._known)):
            self._follow()
        return self._function(self.owner, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.Signature(list(inspect.signature(self._original).parameters.values())[1:])

    def _follow(self) -> None:
        """Take over what names refer to in the method's module now."""
        names, self._known = self._function.__globals__, [self._module.get(name) for name in self._names]
        for name, now in zip(self._names, self._known, strict=True):
            if name in self.stand_ins:
                self.stand_ins[name].replaced = now
            elif names.get(name) is not now:
                names[name] = now

    def __getstate__(self) -> tuple[Any, ...]:
        return self.owner, self.method, self.stand_ins

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Rebound.__init__(self, *state)


def undecorated(owner: Any, method: str = "forward") -> FunctionType:
    """Return a method of an object's class without its decorators."""
    function = inspect.unwrap(getattr(type(owner), method))
    if not isinstance(function, FunctionType):
        raise ValueError(f"swap needs an attention layer whose forward is a function, got a {type(owner).__name__}")
    return function


def names_in(owner: Any, method: str = "forward") -> list[str]:
    """Return the global names that a method of an object's class uses; none if it is no function."""
    function = inspect.unwrap(getattr(type(owner), method))
    names = function.__code__.co_names if isinstance(function, FunctionType) else ()
    return [name for name in names if name in function.__globals__]


def with_globals(function: FunctionType, values: dict[str, Any]) -> FunctionType:
    """Return a copy of a function for which global names refer to other values."""
    names = {**function.__globals__, **values}
    del names["__name__"]  # a compiler would look the names up in the module of that name
    code = function.__code__.replace()  # compilers keep graphs by code, and this has names of its own
    copied = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
