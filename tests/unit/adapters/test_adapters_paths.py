"""Which folders may be named, and that nothing is told of those that may not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from adapter_folders import sentence

from mstar.adapters import resolve_path
from mstar.errors import AdapterError


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """`one/sql`, `two/chat` and beside them `secret/adapter`, which nobody may name."""
    for name in ("one/sql/deep", "two/chat", "secret/adapter"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "one", tmp_path / "two"


def code(path: str, roots: tuple[Path, ...]) -> str:
    with pytest.raises(AdapterError) as refused:
        resolve_path(path, roots)
    sentence(refused.value)
    assert refused.value.status == {"adapter_path_not_allowed": 400, "adapter_not_found": 404}[refused.value.code]
    return refused.value.code


def test_paths_below_a_root_are_resolved(roots: tuple[Path, Path]) -> None:
    one, two = roots
    assert resolve_path("sql", roots) == one / "sql"
    assert resolve_path("chat", roots) == two / "chat"
    assert resolve_path("sql/deep/", roots) == one / "sql/deep"
    assert resolve_path(str(two / "chat"), roots) == two / "chat"
    assert resolve_path(str(one), roots) == one
    assert resolve_path("./sql/deep/..", roots) == one / "sql"
    assert resolve_path("../two/chat", roots) == two / "chat"


def test_relative_paths_are_taken_from_the_working_directory_too(roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = roots
    monkeypatch.chdir(one.parent)
    assert resolve_path("one/sql", roots) == one / "sql"
    assert resolve_path("two/chat", (Path("two"), Path("one"))) == two / "chat"
    assert code("secret/adapter", roots) == code("secret/nothing", roots)
    monkeypatch.chdir(one / "sql")
    assert resolve_path("deep", roots) == one / "sql/deep"
    assert resolve_path("../sql", roots) == one / "sql"


@pytest.mark.parametrize(
    "path",
    ["", "\0", "sql\0", "a" * 256, "a/" * 3000, "\ud800", "..", "../secret/adapter", "sql/../../secret/adapter", "../../../../etc",
     "/etc", "/", "/nowhere", "~", "/proc/self/cwd"],
)  # fmt: skip
def test_c81_paths_outside_are_refused(path: str, roots: tuple[Path, Path]) -> None:
    if path == "~":
        assert code(path, roots) == "adapter_not_found"  # a name like any other
    else:
        assert code(path, roots) == "adapter_path_not_allowed"


def test_the_answer_does_not_tell_whether_an_outside_path_exists(roots: tuple[Path, Path]) -> None:
    secret = roots[0].parent / "secret"
    for there, gone in [
        ("../secret/adapter", "../secret/nothing"),
        ("../secret", "../nothing"),
        (str(secret / "adapter"), str(secret / "nothing")),
        (str(secret), str(secret) + "x"),
        ("/etc/passwd", "/etc/passwx"),
    ]:
        messages = []
        for path in (there, gone):
            with pytest.raises(AdapterError) as refused:
                resolve_path(path, roots)
            messages.append(refused.value.message.replace(path, "PATH"))
        assert len(set(messages)) == 1


def test_a_link_out_is_refused_and_tells_nothing(roots: tuple[Path, Path]) -> None:
    one, _ = roots
    (one / "there").symlink_to("../secret/adapter")
    (one / "gone").symlink_to("../secret/nothing")
    (one / "up").symlink_to("..")
    (one / "loop").symlink_to("loop")
    assert code("there", roots) == code("gone", roots) == "adapter_path_not_allowed"
    assert code("up/secret/adapter", roots) == code("up/secret/nothing", roots) == "adapter_path_not_allowed"
    assert code("loop", roots) == "adapter_not_found"
    # `..` is taken off by text, before any link is followed.
    assert resolve_path("up/../sql", roots) == one / "sql"


def test_links_inside_and_from_root_to_root_are_fine(roots: tuple[Path, Path]) -> None:
    one, two = roots
    (one / "alias").symlink_to("sql")
    (one / "across").symlink_to(two / "chat")
    assert resolve_path("alias", roots) == one / "sql"
    assert resolve_path("across", roots) == two / "chat"
    assert code("across", (one,)) == "adapter_path_not_allowed"


def test_a_root_that_is_a_link_is_a_root(roots: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(roots[0])
    assert resolve_path("sql", (tmp_path / "link",)) == roots[0] / "sql"
    assert resolve_path(str(tmp_path / "link/sql"), (tmp_path / "link",)) == roots[0] / "sql"
    assert resolve_path(str(roots[0] / "sql"), (tmp_path / "link",)) == roots[0] / "sql"


def test_inside_but_no_folder_is_not_found(roots: tuple[Path, Path]) -> None:
    (roots[0] / "file").write_text("x")
    for path in ("nothing", "sql/nothing", "file", "file/x", str(roots[0] / "nothing"), "one/sql"):
        assert code(path, roots) == "adapter_not_found"


def test_a_name_that_starts_like_a_root_is_outside(roots: tuple[Path, Path]) -> None:
    os.mkdir(str(roots[0]) + "more")
    assert code(str(roots[0]) + "more", roots) == "adapter_path_not_allowed"
    assert code("../onemore", roots) == "adapter_path_not_allowed"


def test_without_roots_nothing_is_allowed(tmp_path: Path) -> None:
    assert code(str(tmp_path), ()) == code("x", ()) == "adapter_path_not_allowed"
    assert resolve_path("/tmp", (Path("/"),)) == Path("/tmp").resolve()
