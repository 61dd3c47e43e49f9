"""Options from dataclasses: every source, their order, every type, and what is refused in which words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from fourfold.config.click_options import ConfigCommand, config_options
from fourfold.config.engine_config import EngineConfig
from fourfold.config.field_docs import field_docs
from fourfold.config.model_config import ModelConfig
from fourfold.config.options import OptionSet, build_engine_config
from fourfold.errors import ConfigError, PluginError


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Every type that an option can have."""

    whole: int = 1
    """A whole
    number."""
    real: float = 0.5
    flag: bool = False
    """Yes or no."""
    text: str = "x"
    choice: Literal["one", "two"] = "one"
    maybe: int | None = None
    """A number or nothing."""
    several: tuple[str, ...] = ()
    numbers: tuple[int, ...] = (1, 2)
    path: Path = Path("a")
    some_memory: int | None = None
    """Bytes."""

    def __post_init__(self) -> None:
        if self.whole < 0:
            raise ConfigError(f"--whole is {self.whole}; 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPluginSettings:
    threads: int = 2
    """How many."""


@pytest.fixture
def options():
    return OptionSet((SampleConfig,), {"my-plugin": MyPluginSettings})


def read(options, given=(), environment=None, file=None):
    return options.read(dict(given), environment=environment or {}, file=file)


def build(options, given=(), environment=None, file=None):
    return options.build(SampleConfig, read(options, given, environment, file))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "12", 12),
        ("real", "2", 2.0),
        ("flag", "on", True),
        ("flag", "FALSE", False),
        ("text", "a b", "a b"),
        ("choice", "two", "two"),
        ("maybe", "3", 3),
        ("several", "a,b", ("a", "b")),
        ("numbers", "3", (3,)),
        ("path", "/tmp", Path("/tmp")),
        ("some_memory", "2GiB", 2 << 30),
        ("some_memory", "1.5 MiB", 3 << 19),
        ("some_memory", "2GB", 2_000_000_000),
        ("some_memory", "4096", 4096),
    ],
)
def test_values_are_read_by_type(options, name, text, value):
    for sources in ({"given": {name: text}}, {"environment": {f"FOURFOLD_{name.upper()}": text}}):
        assert getattr(build(options, **sources), name) == value


@pytest.mark.parametrize(
    ("name", "value", "wants"),
    [
        ("whole", "a", "a whole number"),
        ("whole", 2.5, "a whole number"),
        ("whole", True, "a whole number"),
        ("whole", None, "a whole number"),
        ("real", "nan", "a number"),
        ("real", "inf", "a number"),
        ("flag", "maybe", "true or false"),
        ("flag", 1, "true or false"),
        ("choice", "three", "one of one, two"),
        ("text", 3, "text"),
        ("several", 3, "a list"),
        ("numbers", "a,b", "a whole number"),
        ("some_memory", "2 bananas", "a size such as 2GiB"),
        ("some_memory", "-1", "a size such as 2GiB"),
        ("whole", 2**63, "a whole number below 2**63"),
        ("some_memory", "99999999TiB", "a whole number below 2**63"),
        ("path", "", "a path"),
        ("text", "a\0b", "text without null characters"),
        ("text", "\udcff", "text that is UTF-8"),
    ],
)
def test_wrong_values_are_refused_with_option_value_and_source(options, name, value, wants):
    with pytest.raises(ConfigError) as caught:
        options.parse({name: value}, "somewhere")
    assert str(caught.value).startswith(f"--{name.replace('_', '-')} is {value!r} (from somewhere); it takes {wants}")


def test_the_command_line_wins_over_environment_over_file_over_default(options, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("whole: 3\nreal: 3\nmaybe: 3\n")
    config = build(options, {"whole": "1"}, {"FOURFOLD_WHOLE": "2", "FOURFOLD_REAL": "2"}, file)
    assert (config.whole, config.real, config.maybe, config.text) == (1, 2.0, 3, "x")


def test_what_was_not_given_on_the_command_line_does_not_count(options):
    config = build(options, {"whole": None, "several": ()}, {"FOURFOLD_WHOLE": "2", "FOURFOLD_SEVERAL": "a"})
    assert (config.whole, config.several) == (2, ("a",))


def test_errors_name_the_variable_or_file_that_a_value_came_from(options, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("whole: -1\n")
    with pytest.raises(ConfigError, match=r"--whole is 'x' \(from FOURFOLD_WHOLE\)"):
        build(options, environment={"FOURFOLD_WHOLE": "x"})
    with pytest.raises(ConfigError, match=rf"--whole is -1; 0 or more \(--whole is from {file}\)"):
        build(options, file=file)
    with pytest.raises(ConfigError, match=r"^--whole is -1; 0 or more$"):
        build(options, {"whole": "-1"})


def test_a_file_may_use_dashes_and_lists_and_be_named_by_a_variable(options, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("some-memory: 2GiB\nseveral: [a, 'b,c']\nmaybe: null\nmy-plugin-threads: 5\n")
    settings = read(options, environment={"FOURFOLD_CONFIG": str(file)})
    config = options.build(SampleConfig, settings)
    assert (config.some_memory, config.several, config.maybe) == (2 << 30, ("a", "b,c"), None)
    assert settings["my_plugin_threads"].value == 5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("whol: 1", "no option 'whol' .*did you mean 'whole'"),
        ("- whole", "holds a list; write one 'option: value' a line"),
        ("a: [", "is no YAML"),
        ("whole: 1\nwhole: 2", "is no YAML: 'whole' is there twice .*line 2"),
        ("some-memory: 1\nsome_memory: 2", "has 'some_memory' twice, with - and with _"),
        ("sample:\n  whole: 1", "has a section 'sample'; options stand at the top, without sections, as in 'whole: "),
    ],
)
def test_a_wrong_file_is_refused(options, tmp_path, content, says):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        read(options, file=file)


def test_a_missing_file_is_refused(options, tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml' cannot be read"):
        read(options, file=tmp_path / "none.yaml")


def test_an_empty_file_sets_nothing(options, tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read(options, file=tmp_path / "empty.yaml") == {}


def test_settings_of_plugins_are_options_too():
    settings = {"my-plugin": MyPluginSettings}
    assert build_engine_config(settings).plugins == {"my-plugin": MyPluginSettings()}
    assert build_engine_config(settings, my_plugin_threads=7).plugins["my-plugin"].threads == 7
    option = OptionSet((EngineConfig,), settings).options["my_plugin_threads"]
    assert (option.flag, option.variable) == ("--my-plugin-threads", "FOURFOLD_MY_PLUGIN_THREADS")
    assert option.help == "How many."


def test_two_plugins_that_make_one_option_are_refused():
    @dataclass(frozen=True)
    class Clash:
        plugin_threads: int = 1

    with pytest.raises(PluginError, match="both make the option --my-plugin-threads"):
        OptionSet((), {"my": Clash, "my-plugin": MyPluginSettings})


def test_an_engine_config_is_built_from_flat_names():
    config = build_engine_config(model="m", max_num_seqs="8", served_model_name=["a", "b"], kv_cache_memory="1MiB")
    assert config.model == ModelConfig(model="m", served_model_name=("a", "b"))
    assert (config.scheduler.max_num_seqs, config.cache.kv_cache_memory) == (8, 1 << 20)
    assert build_engine_config() == EngineConfig()


def test_an_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"no option 'max_num_seq' \(from an argument\); did you mean 'max_num_seqs'"):
        build_engine_config(max_num_seq=8)


# --- on the command line --------------------------------------------------------------------------------------------


def run(options, *arguments, skip=()):
    seen = {}

    @click.command(cls=ConfigCommand)
    @config_options(options, skip=skip)
    def command(**given):
        seen.update(given)

    result = CliRunner().invoke(command, arguments)
    return seen, result


def test_click_hands_on_what_was_typed(options):
    seen, result = run(
        options, "--whole", "x", "--flag", "--several", "a,b", "--several", "c", "--my-plugin-threads", "3"
    )
    assert result.exit_code == 0, result.output
    assert {name: value for name, value in seen.items() if value not in (None, ())} == {
        "whole": "x",
        "flag": True,
        "several": ("a,b", "c"),
        "my_plugin_threads": "3",
    }
    assert run(options, "--no-flag")[0]["flag"] is False
    assert run(options, "--config", "c.yaml")[0]["config_file"] == "c.yaml"
    assert "--whole" not in run(options, "--help", skip={"whole"})[1].output


@pytest.mark.parametrize("typed", [("a,b",), ("a", "b"), ("a, b",)])
def test_lists_may_be_repeated_and_have_commas(options, typed):
    assert build(options, {"several": typed}).several == ("a", "b")


def test_help_says_how_to_give_lists(options):
    flat = " ".join(run(options, "--help")[1].output.split())
    assert "--several TEXT,... Put commas between several, or repeat the option." in flat


def test_help_is_by_section_and_says_type_default_and_doc(options):
    output = run(options, "--help")[1].output
    assert output.index("Sample options:") < output.index("my-plugin options:")
    flat = " ".join(output.split())
    assert "--whole N A whole number. [default: 1]" in flat
    assert "--choice [one|two]" in flat
    assert "--some-memory BYTES Bytes." in flat
    assert "--flag / --no-flag Yes or no. [default: off]" in flat


def test_docs_are_the_strings_under_fields():
    assert field_docs(SampleConfig)["whole"] == "A whole number."
    assert "real" not in field_docs(SampleConfig)
    assert field_docs(MyPluginSettings) == {"threads": "How many."}


def test_options_need_no_torch():
    code = "import sys, fourfold.config.click_options; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_a_variable_that_is_almost_an_option_is_warned_of_and_others_are_not(options, caplog):
    read(options, environment={"FOURFOLD_WHOEL": "3", "FOURFOLD_SERVICE_PORT": "80", "WHOEL": "1"})
    assert caplog.messages == [
        "the variable FOURFOLD_WHOEL is no option and has no effect; did you mean FOURFOLD_WHOLE?"
    ]


def test_a_file_that_is_nested_without_end_is_refused(options, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("[" * 20_000)
    with pytest.raises(ConfigError, match=r"config\.yaml' is no YAML"):
        read(options, file=file)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"served_model_name": " "}, "--served-model-name is empty"),
        ({"revision": ""}, "--revision is empty"),
        ({"chat_template": ""}, "--chat-template is empty"),
        ({"num_blocks": 2**31}, "--num-blocks is 2147483648; from 2 to 2147483647"),
        ({"max_num_seqs": 10**8}, "--max-num-seqs is 100000000; from 1 to 65536"),
        ({"max_num_batched_tokens": 10**9}, "--max-num-batched-tokens is 1000000000; from 1 to 1048576"),
        ({"max_in_flight": 65}, "--max-in-flight is 65; from 1 to 64"),
        ({"drain_timeout": -1}, "--drain-timeout is -1; seconds 0 or more"),
        ({"rpc_timeout": 0}, "--rpc-timeout is 0; seconds above 0"),
    ],
)
def test_values_that_cannot_work_are_refused(values, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        build_engine_config(**values)


def test_a_secret_that_is_no_text_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        build_engine_config(cluster_secret=1234567890123456)
    assert str(caught.value) == "--cluster-secret is of type int (from an argument); it takes text; put it in quotes"
