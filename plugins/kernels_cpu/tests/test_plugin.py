"""What the entries claim, without the kernels; and the compiler's cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fourfold import native_build
from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.errors import Unsupported
from fourfold_kernels_cpu import build, cpu_support, native, plugin


def entries():
    return [
        *plugin.fourfold_linear_methods(),
        *plugin.fourfold_attention_backends(),
        *plugin.fourfold_operators(),
    ]


@pytest.fixture
def supported(monkeypatch):
    monkeypatch.setattr(plugin, "unsupported_reason", lambda: None)
    monkeypatch.setattr("fourfold.config.resolution.accelerator", lambda: "cpu")


def test_offers_three_entries():
    assert [entry.name for entry in entries()] == ["packed_bf16", "avx512", "avx512"]


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, fourfold_kernels_cpu.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_suits_bfloat16_on_this_cpu(supported):
    for dtype in ("auto", "bfloat16"):
        config = EngineConfig(model=ModelConfig(dtype=dtype))
        assert [entry.suits(config).score for entry in entries()] == [50, 50, 50]


def test_steps_back_for_other_dtypes_devices_and_block_sizes(supported, monkeypatch):
    config = EngineConfig(model=ModelConfig(dtype="float32"))
    assert [entry.suits(config).score for entry in entries()] == [0, 0, 0]
    assert "--dtype bfloat16" in entries()[0].suits(config).reason
    small = EngineConfig(cache=CacheConfig(block_size=8))
    assert [entry.suits(small).score for entry in entries()] == [50, 0, 50]
    monkeypatch.setattr("fourfold.config.resolution.accelerator", lambda: "cuda")
    assert [entry.suits(EngineConfig()).score for entry in entries()] == [0, 0, 0]


def test_steps_back_without_instructions_or_compiler(monkeypatch):
    monkeypatch.setattr("fourfold.config.resolution.accelerator", lambda: "cpu")
    monkeypatch.setattr(cpu_support, "missing_flags", lambda: ("avx512_bf16",))
    assert entries()[0].suits(EngineConfig()).reason == "the CPU lacks avx512_bf16"
    monkeypatch.setattr(cpu_support, "missing_flags", lambda: ())
    monkeypatch.setenv("CXX", "no-such-compiler")
    suits = entries()[0].suits(EngineConfig())
    assert suits.score == 0
    assert "install g++" in suits.reason
    with pytest.raises(Unsupported, match="install g"):
        build.ensure_built()


@pytest.mark.skipif(cpu_support.compiler() is None, reason="no C++ compiler")
def test_builds_once_into_the_cache(monkeypatch, tmp_path):
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    (sources / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = build.ensure_built()
    before = library.stat().st_mtime_ns
    assert build.ensure_built() == library
    assert library.stat().st_mtime_ns == before
    assert sorted(os.listdir(library.parent)) == [build.LIBRARY, "lock"]
    (sources / "two.cpp").write_text("broken\n")
    with pytest.raises(Unsupported, match=r"two\.cpp"):
        build.ensure_built()
    assert not list((tmp_path / "cache").rglob("*.o"))


@pytest.mark.skipif(cpu_support.compiler() is None, reason="no C++ compiler")
def test_a_cache_that_cannot_be_written_is_unsupported(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(Unsupported, match="set XDG_CACHE_HOME"):
        build.ensure_built()


def test_a_compiler_that_does_not_run_is_unsupported(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_bytes(b"\x7fELF no program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(Unsupported, match=r"does not run: .*; repair it or set CXX"):
        build.ensure_built()


def test_a_damaged_library_is_unsupported_and_named(tmp_path):
    library = tmp_path / build.LIBRARY
    library.write_bytes(b"\x7fELF cut off")
    with pytest.raises(Unsupported, match=f"cannot be loaded: .*; delete '{library}'"):
        native.Native(library)


def test_no_folder_for_the_cache_is_unsupported(monkeypatch):
    def homeless():
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native_build.Path, "home", homeless)
    with pytest.raises(Unsupported, match="could not determine home directory; set XDG_CACHE_HOME"):
        build.ensure_built()
