from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fourfold.config.options import build_engine_config
from fourfold.config.transport import encode_config
from fourfold.messages import EngineFailed, EngineReady
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold.supervision.run_directory import CONFIG_FILE

DEADLINE = 120.0


class Engine:
    """Starts engine processes and collects what they say."""

    def __init__(self, folder: Path, supervisor: ChildSupervisor) -> None:
        self.folder = folder
        self.supervisor = supervisor
        self.events: queue.Queue[bytes | ChildExit] = queue.Queue()

    def start(self) -> ChildProcess:
        arguments = [str(self.folder), "--engine", "0", "--dp-rank", "0", "--incarnation", "3"]
        arguments += ["--num-api-servers", "1", "--log-level", "info"]
        return self.supervisor.start(
            ChildCommand(module="fourfold.engine.process", label="engine", arguments=arguments),
            on_report=lambda _, report: self.events.put(report),
            on_exit=lambda _, how: self.events.put(how),
        )

    def failure(self) -> EngineFailed:
        """What a start that fails says, and nothing else."""
        self.start()
        report = self.events.get(timeout=DEADLINE)
        assert isinstance(report, bytes)
        assert self.events.get(timeout=DEADLINE) == ChildExit(status=1)
        message = msgspec.msgpack.decode(report, type=EngineReady | EngineFailed)
        assert isinstance(message, EngineFailed)
        assert message.incarnation == 3
        return message


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with ChildSupervisor() as supervisor:
        yield Engine(tmp_path, supervisor)


def test_a_model_that_is_not_there_is_a_refusal(engine: Engine) -> None:
    config = build_engine_config(model="no-such-model")
    (engine.folder / CONFIG_FILE).write_bytes(encode_config(config))
    failure = engine.failure()
    assert failure.refused
    assert "no model called 'no-such-model'" in failure.message
    assert failure.traceback == ""


def test_an_error_of_ours_comes_with_its_traceback(engine: Engine) -> None:
    failure = engine.failure()
    assert not failure.refused
    assert failure.message.startswith("FileNotFoundError: ")
    assert CONFIG_FILE in failure.message
    assert failure.traceback.rstrip().endswith(failure.message)


def test_an_error_of_a_worker_is_a_refusal_if_the_user_can_change_it(engine: Engine) -> None:
    broken = engine.folder / "model"
    broken.mkdir()
    (broken / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, '
        '"max_position_embeddings": 64, "rms_norm_eps": 1e-5}'
    )
    (broken / "tokenizer.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    config = build_engine_config(model=str(broken), dtype="float32")
    (engine.folder / CONFIG_FILE).write_bytes(encode_config(config))
    failure = engine.failure()
    assert failure.refused
    assert "model.safetensors" in failure.message
