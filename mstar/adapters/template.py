"""Whether a chat template is one that jinja2 can parse and translate: a refusal at the load and not at the first chat.

It is parsed and translated with the tags that transformers gives a template when it renders one, and goes no further: nothing of it runs,
no constant expression is computed (`{{ 9**9**9 }}` would never end), and the interpreter compiles nothing (which holds up every thread).
Front process and `mstar adapters check`: ranks never see templates, so jinja2 is imported here, late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Node, Template


def template_problem(text: str) -> str | None:
    """Why `text` is no template that can be compiled; None where it is one."""
    from jinja2 import TemplateSyntaxError

    environment = _environment()
    try:
        tree = environment.parse(text)
        if _computes_a_modifier(tree):
            return "`autoescape` must be set to true or false as it stands"
        environment.compile(tree, raw=True)
        stray = _jump_out_of_no_loop(tree)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "it nests too deeply"
    except ValueError as error:  # a number of more digits than the interpreter reads
        return " ".join(str(error).split())
    return None if stray is None else f"line {stray}: `break` or `continue` stands in no loop"


def _jump_out_of_no_loop(node: Node, *, in_loop: bool = False) -> int | None:
    """The line of a `break` or `continue` that only the interpreter would find to have no loop; None where there is none."""
    from jinja2.nodes import Block, Break, CallBlock, Continue, For, Macro

    if isinstance(node, (Break, Continue)):
        return None if in_loop else int(node.lineno)
    in_loop = not isinstance(node, (Block, CallBlock, Macro)) and (in_loop or isinstance(node, For))
    lines = (_jump_out_of_no_loop(child, in_loop=in_loop) for child in node.iter_child_nodes())
    return next((line for line in lines if line is not None), None)


def _computes_a_modifier(tree: Template) -> bool:
    """Whether a block's options are an expression: the one kind that the translation itself would compute."""
    from jinja2.nodes import Const, EvalContextModifier

    return any(not isinstance(option.value, Const) for node in tree.find_all(EvalContextModifier) for option in node.options)


def _environment() -> Environment:
    from jinja2 import nodes, pass_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's own words for training; in a prompt it means nothing."""

        tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    @pass_context
    def left_to_the_rendering(context: Any, value: Any) -> Any:
        """An output that needs the context is not computed before there is one."""
        return value

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=left_to_the_rendering, extensions=[Generation, loopcontrols]
    )
