"""Where settings come from: a flag before an environment variable before a key of a TOML file before the default.

All of it is derived from the fields of a dataclass, `ServerConfig` for a server. Whatever is wrong is an
`InvalidArgument` that names the value and the flag, the variable, or the file and the key: an unknown key is refused as
much as a bad one, since what was misspelt would otherwise leave its default in force.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from radix_cache.errors import InvalidArgument
from radix_cache_service.config import ServerConfig

__all__ = ["CONFIG_VARIABLE", "SETTINGS", "Setting", "Settings", "read_settings", "settings_of"]

C = TypeVar("C")

_PREFIX = "RADIX_CACHE_"
# Not settings: where the tests find their traces, what the commands that connect are told, what a router is, and what
# Kubernetes tells of services named radix-cache-something.
_OTHERS = re.compile(r"TRACES|(?:CLIENT|ROUTE)_.*|(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT(?:_\d+_.*)?)")
_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a dataclass of settings as the world outside sees it.

    kind: the type of its value, or of each of its values if ``is_list``. flags: its own name first. variable: the
    environment variable.
    """

    name: str
    kind: type[Any]
    is_list: bool
    is_mode: bool
    is_hidden: bool
    default: Any
    help_text: str
    flags: tuple[str, ...]
    variable: str

    def parse(self, text: str) -> Any:
        """Return the value that ``text`` says, one of a list's. Raises `InvalidArgument`."""
        try:
            return self._parser(text)
        except (ValueError, KeyError) as error:
            raise InvalidArgument(f"{text!r} is not {self._noun}") from error

    @property
    def _parser(self) -> Callable[[str], Any]:
        if self.is_mode:
            return lambda text: int(text, 8)
        return (lambda text: _TRUTHS[text.lower()]) if self.kind is bool else self.kind

    @property
    def _noun(self) -> str:
        if self.is_mode:
            return "an octal number such as 660"
        return {int: "a valid integer", float: "a valid number", bool: "true or false", str: "a text"}[self.kind]

    def parse_variable(self, text: str) -> Any:
        """Return what the environment variable says; a list is separated by commas."""
        return tuple(self.parse(part.strip()) for part in text.split(",")) if self.is_list else self.parse(text)

    def check_key(self, value: Any) -> Any:
        """Return what the key of a TOML file says, which has types of its own."""
        if not self.is_list:
            return self._check_item(value)
        if not isinstance(value, list):
            raise InvalidArgument(f"{value!r} is not a list")
        return tuple(map(self._check_item, value))

    def _check_item(self, value: Any) -> Any:
        if self.is_mode:
            if isinstance(value, str):
                return self.parse(value)
            raise InvalidArgument(f"{value!r} is a number: write a mode as a text, '660'")
        if type(value) is self.kind or (self.kind is float and type(value) is int):
            return self.kind(value)
        raise InvalidArgument(f"{value!r} is not {self._noun}")


def settings_of(config: type[Any], prefix: str = _PREFIX) -> Iterator[Setting]:
    """Yield the settings that a dataclass of `setting` fields has. prefix: of their environment variables."""
    hints = get_type_hints(config)
    for item in fields(config):
        hint = hints[item.name]
        kinds = [kind for kind in get_args(hint) or (hint,) if kind not in {type(None), Ellipsis}]
        is_list = getattr(hint, "__origin__", None) is tuple
        known = item.metadata
        yield Setting(
            name=item.name,
            kind=kinds[0],
            is_list=is_list,
            is_mode=known["is_mode"],
            is_hidden=known["is_hidden"],
            default=item.default,
            help_text=known["help"],
            flags=("--" + item.name.replace("_", "-"), *known["flags"]),
            variable=prefix + item.name.upper(),
        )


class Settings(Generic[C]):
    """All settings of a dataclass, and where they may come from. by_name: with those that are hidden.

    prefix: of the environment variables. config_variable: the one that names a TOML file.
    """

    def __init__(self, config: type[C], prefix: str) -> None:
        self.by_name = {setting.name: setting for setting in settings_of(config, prefix)}
        self.config_variable = f"{prefix}CONFIG"
        self._config = config
        self._prefix = prefix
        self._sayable = {name: setting for name, setting in self.by_name.items() if not setting.is_hidden}

    def read(self, given: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None) -> C:
        """Return the settings ``given`` (by flags) over those of the environment over those of ``file`` over the
        defaults.

        file: a TOML file; where it is None, the one that `config_variable` names. An empty variable is as good as none.
        Raises `InvalidArgument`.
        """
        file = file or environ.get(self.config_variable)
        found = [*self._of_file(Path(file))] if file else []
        found += self._of_environment(environ)
        found += [(name, value, self.by_name[name].flags[0]) for name, value in given.items()]
        values = {name: value for name, value, _ in found}
        try:
            return self._config(**values)
        except InvalidArgument as error:
            origins = {name: origin for name, _, origin in found}
            named = [origins[word] for word in re.findall(r"\w+", str(error)) if word in origins]
            raise InvalidArgument(f"{error} ({', '.join(dict.fromkeys(named))})" if named else str(error)) from error

    def _of_environment(self, environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
        for variable, text in environ.items():
            if not variable.startswith(self._prefix) or not text or variable == self.config_variable:
                continue
            setting = self._sayable.get(variable.removeprefix(self._prefix).lower())
            if setting is not None and setting.variable == variable:
                yield setting.name, _said_by(variable, setting.parse_variable, text), variable
            elif not _OTHERS.fullmatch(variable.removeprefix(self._prefix)):
                known = [setting.variable for setting in self._sayable.values()]
                _refuse(f"environment variable {variable}", variable, known)

    def _of_file(self, path: Path) -> Iterator[tuple[str, Any, str]]:
        for key, value in _read_toml(path).items():
            if key not in self._sayable:
                _refuse(f"key {key!r} in {path}", key, list(self._sayable))
            origin = f"{key} in {path}"
            yield key, _said_by(origin, self._sayable[key].check_key, value), origin


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"configuration file {path}: {error.strerror}") from error
    except ValueError as error:  # neither UTF-8 nor TOML
        raise InvalidArgument(f"configuration file {path}: {error}") from error


def _said_by(origin: str, parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{origin}: {error}") from error


def _refuse(what: str, name: str, known: list[str]) -> None:
    close = get_close_matches(name, known, 1)
    raise InvalidArgument(f"unknown {what}" + (f"; did you mean {close[0]}?" if close else ""))


_SERVER = Settings(ServerConfig, _PREFIX)
SETTINGS = _SERVER.by_name
CONFIG_VARIABLE = _SERVER.config_variable
read_settings = _SERVER.read
