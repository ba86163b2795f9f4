"""Commands from functions: flags are made from the options objects that a function takes."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args

import typer

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import OUTPUT, DebugFlag, JsonFlag
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import Option, declared, flag_name, require_count, takes_several

_Command = Callable[..., int | None]
_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class _Flag:
    """The flag of one option, or of one field."""

    option_name: str
    parameter: inspect.Parameter
    """The command's parameter."""
    value: Callable[[Any], Any] = lambda parsed: parsed
    """Returns the option's value, from what the command line says."""


def as_command(function: _Command) -> _Command:
    """Return a command that Typer takes, with ``--json`` and ``--debug``.

    A parameter whose type is a data class has a flag for each of its fields (see ``common.flag``),
    and ``**options: Unpack[...]`` one for each option of the ``TypedDict`` that has a flag.
    ``console: Console`` is the command's.
    """
    objects: dict[str, tuple[Any, list[_Flag]]] = {}
    options: list[_Flag] = []
    plain: list[inspect.Parameter] = []
    for each in inspect.signature(function).parameters.values():
        kind: Any = each.annotation
        if each.kind is each.VAR_KEYWORD:
            options = list(_option_flags(*get_args(kind)))
        elif is_dataclass(kind):
            objects[each.name] = kind, list(_field_flags(kind))
        elif kind is not Console:
            plain.append(_parameter(each.name, kind, each.default))

    def command(context: typer.Context, **given: Any) -> int | None:
        def taken(flags: list[_Flag]) -> dict[str, Any]:
            return {each.option_name: each.value(given.pop(each.parameter.name)) for each in flags}

        del given["_json"], given["_debug"]  # main() has read them
        made = {name: kind(**taken(flags)) for name, (kind, flags) in objects.items()}
        return function(context.obj, **made, **taken(options), **given)

    # In the order of --help: the flags of a server's own options come before those that it shares.
    flags = [each.parameter for each in options]
    flags += [each.parameter for _, own in objects.values() for each in own]
    flags.sort(key=lambda each: each.annotation.__metadata__[0].rich_help_panel == OUTPUT)
    common = {"_json": JsonFlag, "_debug": DebugFlag}
    flags += [_parameter(name, declaration, False) for name, declaration in common.items()]
    context = _parameter("context", typer.Context, _REQUIRED)
    shown: Any = command
    shown.__signature__ = inspect.Signature([context, *plain, *flags])
    shown.__annotations__ = {}  # Typer would take these for the signature's
    shown.__name__, shown.__doc__ = function.__name__, function.__doc__
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY  # their order is that of --help, defaults or not
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _field_flags(objects: Any) -> Iterator[_Flag]:
    for each in (one for one in fields(objects) if one.metadata):
        name, check = each.name.removesuffix("_s").strip("_"), each.metadata["check"]
        declaration = typer.Option(f"--{name.replace('_', '-')}", **each.metadata["declaration"])
        if check is not None:
            declaration.callback = _checked(name, check)
        yield _Flag(each.name, _parameter(name, Annotated[each.type, declaration], each.default))


def _option_flags(table: type[Mapping[str, Any]]) -> Iterator[_Flag]:
    for name, (kind, option) in declared(table).items():
        if option.has_flag:
            yield option_flag(name, kind, option)


def option_flag(name: str, kind: Any, option: Option) -> _Flag:
    flag = flag_name(name, kind, option)
    is_repeated, is_negated = takes_several(kind), option.default is True
    default = option.default
    if is_repeated:
        kind, default = list[str] | None, None
    elif is_negated:
        default = False
    elif option.choices:
        kind = Literal[option.choices]

    def value(parsed: Any) -> Any:
        if is_negated:
            return not parsed
        return option.default if parsed is None else parsed

    declaration = typer.Option(
        flag,
        metavar=option.metavar or ("SECONDS" if name.endswith("_s") else None),
        rich_help_panel=option.group.value,
        help=option.flag_help or f"{option.help.partition('. ')[0].rstrip('.')}.",
        show_default=option.shown_default,
        callback=_checked(name, lambda name, parsed: option.require(name, value(parsed))),
        autocompletion=(lambda: list(option.choices)) if is_repeated else None,
        min=1 if option.check is require_count else None,
    )
    parameter = flag.removeprefix("--").replace("-", "_")
    return _Flag(name, _parameter(parameter, Annotated[kind, declaration], default), value)


def _checked(name: str, check: Callable[[str, Any], object]) -> Callable[[Any], Any]:
    def checked(parsed: Any) -> Any:
        if parsed is not None:
            try:
                check(name, parsed)
            except ConfigurationError as error:
                raise typer.BadParameter(str(error).removeprefix(f"{name}=")) from error
        return parsed

    return checked
