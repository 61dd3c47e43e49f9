"""A library is compiled once; what keeps it from being had is said in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold import native_build
from fourfold.errors import Unsupported
from fourfold.native_build import NativeLibrary, ensure_built

needs_compiler = pytest.mark.skipif(native_build.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return NativeLibrary(name="sample", title="the samples", sources=sources, flags=("-fPIC",), file_name="libone.so")


@needs_compiler
def test_it_is_compiled_once(library: NativeLibrary) -> None:
    path = ensure_built(library)
    before = path.stat().st_mtime_ns
    assert ensure_built(library) == path
    assert path.stat().st_mtime_ns == before


@needs_compiler
def test_another_variant_is_another_build(library: NativeLibrary) -> None:
    other = NativeLibrary(
        name="sample",
        title="the samples",
        sources=library.sources,
        flags=("-fPIC",),
        file_name="libone.so",
        variant="x",
    )
    assert ensure_built(other) != ensure_built(library)


@needs_compiler
def test_broken_sources_name_their_file(library: NativeLibrary) -> None:
    (library.sources / "one.cpp").write_text("broken\n")
    with pytest.raises(Unsupported, match=r"one\.cpp"):
        ensure_built(library)


def test_no_compiler(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match=r"the samples need a C\+\+ compiler; install g\+\+ or set CXX"):
        ensure_built(library)


def test_a_compiler_that_does_not_run(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_bytes(b"\x7fELF no program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(Unsupported, match=r"does not run: .*; repair it or set CXX"):
        ensure_built(library)


@needs_compiler
def test_no_folder_for_the_cache(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native_build.Path, "home", homeless)
    with pytest.raises(Unsupported, match="could not determine home directory; set XDG_CACHE_HOME"):
        ensure_built(library)
