"""Commands from functions: flags are made from the options objects that a function takes."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args

import typer

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import OUTPUT, DebugFlag, JsonFlag
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import Group, Option, declared, flag_name, require_count, takes_several
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions

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

    A parameter whose type is a data class has a flag for each of its fields (see ``common.flag``,
    or ``Option``; ``Annotated[kind, ...]`` names fields that have none),
    and ``**options: Unpack[...]`` one for each option of the ``TypedDict`` that has a flag.
    ``console: Console`` is the command's.
    """
    objects: dict[str, tuple[Any, list[_Flag]]] = {}
    options: list[_Flag] = []
    plain: list[inspect.Parameter] = []
    for each in inspect.signature(function).parameters.values():
        kind, *hidden = get_args(each.annotation) or (each.annotation,)
        if each.kind is each.VAR_KEYWORD:
            options = list(_option_flags(kind))
        elif is_dataclass(kind):
            own = _option_flags(kind) if kind is ListenOptions else _field_flags(kind)
            objects[each.name] = kind, [flag for flag in own if flag.option_name not in hidden]
        elif kind is not Console:
            plain.append(_parameter(each.name, each.annotation, each.default))

    def command(context: typer.Context, **given: Any) -> int | None:
        def taken(flags: list[_Flag]) -> dict[str, Any]:
            return {each.option_name: each.value(given.pop(each.parameter.name)) for each in flags}

        del given["_json"], given["_debug"]  # main() has read them
        made = {name: kind(**taken(flags)) for name, (kind, flags) in objects.items()}
        return function(context.obj, **made, **taken(options), **given)

    # In the order of --help: the flags of a server's own options come before those that it shares.
    listen = [each for kind, own in objects.values() if kind is ListenOptions for each in own]
    tables = sorted(
        (each.parameter for each in listen + options),
        key=lambda each: list(Group).index(_panel(each)),
    )
    flags = [each.parameter for _, own in objects.values() for each in own if each not in listen]
    flags = sorted(tables + flags, key=lambda each: _panel(each) == OUTPUT)
    common = {"_json": JsonFlag, "_debug": DebugFlag}
    flags += [_parameter(name, declaration, False) for name, declaration in common.items()]
    context = _parameter("context", typer.Context, _REQUIRED)
    shown: Any = command
    shown.__signature__ = inspect.Signature([context, *plain, *flags])
    shown.__annotations__ = {}  # Typer would take these for the signature's
    shown.__name__, shown.__doc__ = function.__name__, function.__doc__
    return command


def _panel(parameter: inspect.Parameter) -> Any:
    return parameter.annotation.__metadata__[0].rich_help_panel


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


def _option_flags(table: type[Any]) -> Iterator[_Flag]:
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
