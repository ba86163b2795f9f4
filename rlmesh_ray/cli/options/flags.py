"""Flags of a command, made from the options of the server that it starts."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

import typer

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import Option, declared, flag_name, require_count, takes_several


def takes_flags(
    table: type[Mapping[str, Any]], *, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each option of a ``TypedDict`` that has one.

    The command gets their values as ``**options``. Its other options come after these in its help.

    Args:
        table: The ``TypedDict``.
        without: Names of options whose flags the command declares itself.
    """
    flagged = {
        name: _Flag(name, kind, option)
        for name, (kind, option) in declared(table).items()
        if option.has_flag and name not in without
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*arguments: Any, **given: Any) -> None:
            options = {name: flag.value(given.pop(flag.name)) for name, flag in flagged.items()}
            command(*arguments, **given, **options)

        own = [
            each
            for each in inspect.signature(command).parameters.values()
            if each.kind is not each.VAR_KEYWORD
        ]
        num_arguments = sum(each.default is each.empty for each in own)
        flags = [each.parameter() for each in flagged.values()]
        shown: Any = run
        shown.__signature__ = inspect.Signature(
            [*own[:num_arguments], *flags, *own[num_arguments:]]
        )
        return run

    return decorate


class _Flag:
    """The flag of one option."""

    def __init__(self, name: str, kind: Any, option: Option) -> None:
        self._option_name = name
        self._option = option
        self._is_repeated = takes_several(kind)
        self._is_negated = option.default is True
        self._flag = flag_name(name, kind, option)
        self.name = self._flag.removeprefix("--").replace("-", "_")
        """Of the command's parameter."""
        if self._is_repeated:
            kind = list[str] | None
        elif option.choices:
            kind = Literal[option.choices]
        self._kind = kind

    def value(self, parsed: Any) -> Any:
        """Return the option's value, from what the command line says."""
        if self._is_negated:
            return not parsed
        return self._option.default if parsed is None else parsed

    def parameter(self) -> inspect.Parameter:
        """Return the command's parameter."""
        option = self._option
        declaration = typer.Option(
            self._flag,
            metavar=option.metavar or ("SECONDS" if self._option_name.endswith("_s") else None),
            rich_help_panel=option.group.value,
            help=option.flag_help or f"{option.help.partition('. ')[0].rstrip('.')}.",
            show_default=option.shown_default,
            callback=self._checked,
            autocompletion=(lambda: list(option.choices)) if self._is_repeated else None,
            min=1 if option.check is require_count else None,
        )
        default = option.default
        if self._is_negated or self._is_repeated:
            default = False if self._is_negated else None
        return inspect.Parameter(
            self.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
            annotation=Annotated[self._kind, declaration],
        )

    def _checked(self, parsed: Any) -> Any:
        if parsed is not None:
            name = self._option_name
            try:
                self._option.require(name, self.value(parsed))
            except ConfigurationError as error:
                raise typer.BadParameter(str(error).removeprefix(f"{name}=")) from error
        return parsed
