"""Renders chat templates, as transformers' `apply_chat_template` does."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Renders the text of a conversation, in Jinja's sandbox, because templates come from anywhere.

    Args:
        template: a template in Jinja's language.
        messages: the messages, each with a role and a content; values that are None are left out.
        **variables: what else the template may read, such as add_generation_prompt.

    Raises:
        ValueError: the template is broken or refuses the messages, or these are not plain data.
    """
    from jinja2.exceptions import TemplateError

    chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        plain = json.loads(json.dumps({"messages": chat, **variables}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"messages must be plain data, as in JSON ({error})") from None
    try:
        return str(_compiled(template).render(**plain))
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the chat template cannot render these messages ({type(error).__name__}: {reason})"
        ) from None


@functools.lru_cache(16)
def _compiled(template: str) -> Any:
    """Compiles a template with what transformers' chat_template_utils.py gives templates."""
    # Most programs render no template.
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    class Namespace(jinja2.utils.Namespace):
        """Jinja's namespace without names that reach into Python."""

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace may not have the name {name!r}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "dict": make_dict,
        "namespace": Namespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON; Jinja's own filter would write some characters as HTML does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
