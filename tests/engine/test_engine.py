"""Whole engine: the same tokens however the work is split, and no resource held afterwards."""

import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import (
    AdapterError,
    EngineClosed,
    InvalidRequest,
    NotFinite,
    SettingsError,
    StepFailed,
)
from lorikeet_engine.request import FinishReason
from lorikeet_engine.residency.gpu.adapters import GUARD_S
from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    build,
    greedy,
    nothing_is_held,
    prompt,
)
from tests.engine.peft_adapters import save_adapter


@pytest.fixture(scope="module")
def family(request):
    """Family of the engines of `make`: that of a test's parameter, or Llama."""
    return getattr(request, "param", "llama")


IN_A_HYBRID_TOO = pytest.mark.parametrize(
    "family", ["llama", "qwen3_5_text"], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def peft_folders(family, tiny_checkpoints, tmp_path_factory):
    """Adapters of the family's tiny checkpoint, by name."""
    lora = {"lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj", "in_proj_qkv"]}
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_checkpoints[family], folder / name, seed, r=rank, **lora)
        for seed, (name, rank) in enumerate((("a", 8), ("b", 16), ("c", 4)))
    }


@pytest.fixture
def refs(shelf, peft_folders):
    return {name: shelf.add(folder, name) for name, folder in peft_folders.items()}


@pytest.fixture
def make(family, tiny_checkpoints, shelf, tmp_path, close_later):
    """Engines over the family's tiny checkpoint, closed at the end."""

    def make(**settings):
        return close_later(build(tiny_checkpoints[family], shelf, tmp_path / "cache", **settings))

    return make


def blow_up(folder):
    """Make an adapter's finite weights so large that products with them overflow."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.full_like(t, 3e38) for name, t in tensors.items()}, path)


class TestTokens:
    @pytest.mark.parametrize(
        "family",
        ["llama", "mistral", "qwen2", "qwen3", "qwen3_5_text"],
        indirect=True,
        scope="module",
    )
    def test_base_model_requests_in_a_mixed_batch_equal_transformers(
        self, make, tiny_checkpoints, family
    ):
        answers = Answers(make(max_batch_tokens=24, max_running=8))
        prompts = [prompt(length) for length in (1, 5, 17, 40, 33)]
        for i, ids in enumerate(prompts):
            answers.submit(greedy(f"r{i}", ids, max_tokens=20))
            answers.step()
        answers.all()
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoints[family])
        for i, ids in enumerate(prompts):
            expected = model.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert answers.of(f"r{i}") == expected[0, len(ids) :].tolist()

    def test_chunks_change_no_token(self, make, refs):
        asked = [("base", None), ("a", refs["a"]), ("b", refs["b"])]
        whole, cut = Answers(make()), Answers(make(max_batch_tokens=7, max_running=7))
        witness = RecordingRunner(cut.engine)
        for answers in (whole, cut):
            for i, (name, ref) in enumerate(asked):
                answers.submit(greedy(name, prompt(40, i), adapter=ref))
            answers.all()
        assert cut.tokens == whole.tokens
        assert max(len(batch.token_ids) for batch in witness.batches) == 7

    def test_preemption_changes_no_token(self, make, refs):
        roomy, tight = Answers(make()), Answers(make(kv_pages=8, max_context=128))
        witnesses = [RecordingRunner(answers.engine) for answers in (roomy, tight)]
        for answers in (roomy, tight):
            for i, ref in enumerate((None, refs["a"], refs["b"], None, refs["a"])):
                request = greedy(f"r{i}", prompt(30, i), adapter=ref, max_tokens=60)
                answers.submit(request)
            answers.submit(greedy("drawn", prompt(30), max_tokens=60, temperature=1.0, seed=5))
            answers.all()
        assert tight.tokens == roomy.tokens
        assert witnesses[1].tokens > witnesses[0].tokens, "somebody was computed twice"
        assert nothing_is_held(tight.engine)

    def test_a_prefix_is_computed_once_for_one_tenant_and_adapter(self, make, refs):
        engine = make()
        witness, answers = RecordingRunner(engine), Answers(engine)
        shared, computed = prompt(4 * PAGE), []
        for name, ref, salt in (
            ("first", refs["a"], "acme"),
            ("hit", refs["a"], "acme"),
            ("salt", refs["a"], "globex"),
            ("adapter", refs["b"], "acme"),
            ("base", None, "acme"),
        ):
            before = witness.tokens
            tail = prompt(5, seed=7)
            answers.submit(greedy(name, shared + tail, adapter=ref, salt=salt, max_tokens=4))
            answers.all()
            computed.append(witness.tokens - before - 3)
        assert computed == [4 * PAGE + 5, 5, 4 * PAGE + 5, 4 * PAGE + 5, 4 * PAGE + 5]
        assert answers.of("hit") == answers.of("first") == answers.of("salt")
        assert answers.of("adapter") != answers.of("first") != answers.of("base")

    def test_choices_of_several_prompts_share_prefixes_and_number_seeds_in_order(self, make, refs):
        engine = make()
        witness, answers = RecordingRunner(engine), Answers(engine)
        prompts = [prompt(2 * PAGE + 3), prompt(2 * PAGE + 3, seed=1)]
        sampling = {"temperature": 1.0, "seed": 11, "max_tokens": 8, "adapter": refs["a"]}
        answers.submit(greedy("both", *prompts, n=3, **sampling))
        answers.all()
        assert set(answers.finish) == {("both", choice) for choice in range(6)}
        assert witness.tokens == 2 * (2 * PAGE + 3) + 2 * 2 * 3 + 6 * 7
        assert len({tuple(answers.of("both", choice)) for choice in range(6)}) == 6
        for choice in range(6):
            again = greedy(f"{choice}", prompts[choice // 3], **{**sampling, "seed": 11 + choice})
            answers.submit(again)
            answers.all()
            assert answers.of(f"{choice}") == answers.of("both", choice)

    def test_sampled_answers_differ_without_a_seed(self, make):
        answers = Answers(make())
        for name in "xy":
            answers.submit(greedy(name, prompt(5), temperature=1.5, max_tokens=30))
        answers.all()
        assert answers.of("x") != answers.of("y")


class TestEnds:
    def test_max_tokens_ends_with_length(self, make):
        answers = Answers(make())
        answers.submit(greedy("r", prompt(5), max_tokens=7))
        answers.all()
        assert len(answers.of("r")) == 7
        assert answers.finish["r", 0] is FinishReason.LENGTH

    def test_max_tokens_is_cut_to_the_context(self, make):
        answers = Answers(make(max_context=64))
        answers.submit(greedy("r", prompt(60), max_tokens=100))
        answers.all()
        assert len(answers.of("r")) == 4
        assert answers.finish["r", 0] is FinishReason.LENGTH

    def test_a_stop_id_ends_the_choice_and_is_not_part_of_it(self, make):
        answers = Answers(make())
        answers.submit(greedy("whole", prompt(9)))
        answers.all()
        tokens = answers.of("whole")
        answers.submit(greedy("cut", prompt(9), stop_token_ids=(tokens[6],)))
        answers.all()
        assert answers.of("cut") == tokens[: tokens.index(tokens[6])]
        assert answers.finish["cut", 0] is FinishReason.STOP

    def test_the_models_eos_token_ends_a_choice_unless_ignored(self, make):
        engine = make()
        answers = Answers(engine)
        asked = [prompt(6, seed) for seed in range(40)]
        for i, ids in enumerate(asked):
            answers.submit(greedy(f"{i}", ids, ignore_eos=False, max_tokens=40))
            answers.submit(greedy(f"on {i}", ids, max_tokens=40))
        answers.all()
        stopped = [i for i in range(40) if answers.finish[f"{i}", 0] is FinishReason.STOP]
        assert stopped, "none of the prompts leads to the end id: choose others"
        for i in stopped:
            length = len(answers.of(f"{i}"))
            assert answers.of(f"on {i}")[: length + 1] == [*answers.of(f"{i}"), 2]
        assert all(answers.finish[f"on {i}", 0] is FinishReason.LENGTH for i in range(40))

    def test_no_stop_token_ends_a_choice_before_min_tokens(self, make):
        engine = make()
        answers = Answers(engine)
        everything = tuple(range(3, 256))
        answers.submit(greedy("r", prompt(9), stop_token_ids=everything, min_tokens=5))
        answers.all()
        assert len(answers.of("r")) >= 5
        assert set(answers.of("r")[:5]) <= {0, 1, 2}


class TestRefusals:
    def test_a_prompt_as_long_as_the_context_is_refused_with_the_numbers(self, make):
        engine = make(max_context=64)
        with pytest.raises(InvalidRequest, match=r"is 64 tokens\. However, the prompt has 64"):
            engine.submit(greedy("r", prompt(64)))
        engine.submit(greedy("r", prompt(63)))

    def test_the_context_is_limited_by_the_kv_cache(self, make):
        engine = make(kv_pages=3)
        assert engine.info.max_context == 3 * PAGE
        answers = Answers(engine)
        answers.submit(greedy("r", prompt(3 * PAGE - 2), max_tokens=100))
        answers.all()
        assert len(answers.of("r")) == 2
        with pytest.raises(InvalidRequest, match=r"is 48 tokens\. However, the prompt has 48"):
            engine.submit(greedy("longer", prompt(3 * PAGE)))

    def test_a_kv_cache_too_small_for_one_sequence_is_refused_at_the_start(self, make):
        with pytest.raises(SettingsError, match="one sequence of 128 needs"):
            make(kv_pages=7, max_context=128)

    @pytest.mark.parametrize("ids", [[1, 256], [-1, 5]])
    def test_token_ids_outside_the_vocabulary_are_refused(self, make, ids):
        engine = make()
        with pytest.raises(InvalidRequest, match="want 0 to 255") as caught:
            engine.submit(greedy("r", ids))
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(greedy("r", [1], stop_token_ids=tuple(ids)))
        assert caught.value.param == "stop_token_ids"

    def test_a_request_id_in_flight_is_refused(self, make):
        answers = Answers(make())
        answers.submit(greedy("r", [5]))
        with pytest.raises(InvalidRequest, match="in flight"):
            answers.engine.submit(greedy("r", [5]))
        answers.all()
        answers.engine.submit(greedy("r", [5]))

    def test_settings_that_contradict_each_other_are_refused(self, make):
        with pytest.raises(SettingsError, match="at least max_running"):
            make(max_batch_tokens=8, max_running=9)
        with pytest.raises(SettingsError, match="want float32, float16, bfloat16"):
            make(dtype="int4")
        with pytest.raises(SettingsError, match="want seconds above 0"):
            make(inter_token_goal_s=0.0)

    def test_a_closed_engine_fails_open_requests_and_refuses_new_requests(self, make):
        engine = make()
        engine.submit(greedy("r", [5]))
        (failed,) = engine.close()
        assert failed.request_id == "r"
        assert isinstance(failed.error, EngineClosed)
        assert engine.close() == []
        with pytest.raises(EngineClosed):
            engine.submit(greedy("r", [5]))


@IN_A_HYBRID_TOO
class TestAborts:
    """The step after an abort has freed everything, and returns no more output of the request."""

    def test_an_abort_before_the_first_step_frees_everything(self, make, refs):
        engine = make()
        engine.submit(greedy("r", prompt(20), adapter=refs["a"]))
        engine.abort("r")
        assert engine.step() == []
        assert nothing_is_held(engine)

    def test_an_abort_during_the_adapters_load_frees_everything(self, make, shelf, refs):
        engine = make()
        shelf.hold(refs["a"])
        engine.submit(greedy("r", prompt(20), adapter=refs["a"]))
        assert engine.step() == []
        assert engine.status().live.waiting == 1
        engine.abort("r")
        engine.wait(5)
        assert engine.step() == []
        assert nothing_is_held(engine)
        shelf.release(refs["a"])

    def test_an_abort_in_the_middle_of_a_prompt_frees_everything(self, make):
        engine = make(max_batch_tokens=8, max_running=8)
        engine.submit(greedy("r", prompt(30)))
        assert engine.step() == []
        assert engine.status().live.kv_pages_used > 0
        engine.abort("r")
        assert engine.step() == []
        assert nothing_is_held(engine)

    def test_an_abort_in_the_middle_of_an_answer_frees_everything(self, make, refs):
        answers = Answers(make())
        answers.submit(greedy("r", prompt(30), adapter=refs["a"], max_tokens=100))
        answers.until(lambda: answers.tokens)
        assert not nothing_is_held(answers.engine)
        answers.engine.abort("r")
        assert answers.engine.step() == []
        assert nothing_is_held(answers.engine)

    def test_an_abort_of_a_preempted_request_frees_everything(self, make):
        answers = Answers(make(kv_pages=4, max_context=64))
        for name in ("old", "young"):
            answers.submit(greedy(name, prompt(20), max_tokens=40))
        answers.until(lambda: answers.engine.status().live.waiting == 1 and answers.tokens)
        answers.engine.abort("young")
        del answers.pending["young"]
        answers.all()
        assert len(answers.of("old")) == 40
        assert nothing_is_held(answers.engine)

    def test_an_abort_of_one_choice_leaves_the_others(self, make):
        answers = Answers(make())
        answers.submit(greedy("r", prompt(20), n=3, temperature=1.0, max_tokens=20))
        answers.until(lambda: len(answers.tokens) == 3)
        answers.engine.abort("r", 1)
        answers.pending["r"] -= 1
        answers.all()
        assert [len(answers.of("r", choice)) == 20 for choice in range(3)] == [True, False, True]
        answers.submit(greedy("r", prompt(20)))  # the id is free again
        answers.engine.abort("r")

    def test_an_abort_of_an_ended_or_unknown_request_does_nothing(self, make):
        answers = Answers(make())
        answers.submit(greedy("r", [5]))
        answers.all()
        answers.engine.abort("r")
        answers.engine.abort("stranger", 3)
        answers.submit(greedy("r", [5]))
        answers.all()


@IN_A_HYBRID_TOO
class TestFailures:
    def test_a_forward_pass_that_raises_fails_only_its_own_requests(self, make, refs):
        engine = make(max_running=2)
        witness, answers = RecordingRunner(engine), Answers(engine)
        for name in ("one", "two", "later"):
            answers.submit(greedy(name, prompt(20), adapter=refs["a"], max_tokens=6))
        answers.until(lambda: len(answers.tokens) == 2)
        witness.error = RuntimeError("device-side assert")
        answers.all()
        assert {name: type(e) for name, e in answers.errors.items()} == {
            "one": StepFailed,
            "two": StepFailed,
        }
        assert len(answers.of("later")) == 6
        assert nothing_is_held(engine)

    def test_all_choices_of_a_failed_request_end_together(self, make):
        engine = make(max_running=2)
        witness, answers = RecordingRunner(engine), Answers(engine)
        witness.error = RuntimeError("device-side assert")
        answers.submit(greedy("r", prompt(5), n=5))
        answers.all()
        assert isinstance(answers.errors["r"], StepFailed)
        assert nothing_is_held(engine)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_an_adapter_that_overflows_fails_its_requests_with_its_name(
        self, make, family, shelf, tiny_checkpoints, refs, tmp_path, overlap
    ):
        folder = save_adapter(
            tiny_checkpoints[family], tmp_path / "huge", target_modules=["q_proj"]
        )
        blow_up(folder)
        huge = shelf.add(folder, "huge")
        answers = Answers(make(overlap=overlap))
        answers.submit(greedy("bad", prompt(5), adapter=huge, n=2))
        answers.submit(greedy("good", prompt(5), adapter=refs["b"]))
        answers.submit(greedy("base", prompt(5)))
        answers.all()
        assert isinstance(answers.errors["bad"], NotFinite)
        assert "huge" in str(answers.errors["bad"])
        assert set(answers.errors) == {"bad"}
        alone = Answers(make(overlap=overlap))
        alone.submit(greedy("good", prompt(5), adapter=refs["b"]))
        alone.all()
        assert answers.of("good") == alone.of("good")
        assert nothing_is_held(answers.engine)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_overlap_delays_tokens_by_exactly_one_step(self, make, overlap):
        answers = Answers(make(overlap=overlap))
        answers.submit(greedy("r", prompt(5), max_tokens=3))
        for expected in [0, 1, 2, 3] if overlap else [1, 2, 3]:
            answers.step()
            assert len(answers.tokens.get(("r", 0), [])) == expected

    def test_an_adapter_that_cannot_be_fetched_fails_only_its_requests(self, make, shelf, refs):
        answers = Answers(make())
        shelf.broken.add(refs["a"].digest)
        answers.submit(greedy("bad", prompt(5), adapter=refs["a"], n=2))
        answers.submit(greedy("also bad", prompt(5), adapter=refs["a"]))
        answers.submit(greedy("good", prompt(5), adapter=refs["b"]))
        answers.all()
        assert set(answers.errors) == {"bad", "also bad"}
        assert all(isinstance(error, AdapterError) for error in answers.errors.values())
        shelf.broken.clear()
        answers.submit(greedy("bad", prompt(5), adapter=refs["a"]))
        answers.all()
        assert len(answers.of("bad")) == 12
        assert nothing_is_held(answers.engine)


class TestAdapters:
    def test_an_adapter_that_is_loading_blocks_no_other_request(self, make, shelf, refs):
        answers = Answers(make(max_running=1))
        shelf.hold(refs["a"])
        answers.submit(greedy("slow", prompt(5), adapter=refs["a"]))
        answers.submit(greedy("base", prompt(5)))
        answers.submit(greedy("fast", prompt(5), adapter=refs["b"]))
        answers.until(lambda: len(answers.finish) == 2)
        assert "slow" in answers.pending
        shelf.release(refs["a"])
        answers.all()

    def test_a_step_has_at_most_max_batch_adapters_with_one_segment_each(self, make, refs):
        engine = make(max_batch_adapters=2)
        witness, answers = RecordingRunner(engine), Answers(engine)
        for i in range(12):
            answers.submit(greedy(f"{i}", prompt(5 + i), adapter=[*refs.values(), None][i % 4]))
        answers.all()
        segments = [batch.segments for batch in witness.batches if batch.segments is not None]
        assert max(map(len, segments)) == 2
        for batch in witness.batches:
            check_segments(batch)

    def test_an_unreachable_goal_changes_no_token_and_lets_one_adapter_run_at_a_time(
        self, make, refs
    ):
        said = []
        for goal_s in (None, 1e-9):
            engine = make(inter_token_goal_s=goal_s, max_running=12)
            witness, answers = RecordingRunner(engine), Answers(engine)
            for i in range(12):
                ref = [*refs.values(), None][i % 4]
                answers.submit(greedy(f"{i}", prompt(5 + i), adapter=ref))
            answers.all()
            said.append(answers.tokens)
        assert said[0] == said[1]
        assert {len(b.segments) for b in witness.batches if b.segments is not None} == {1}

    def test_residency_and_pins_of_an_adapter_are_reported(self, make, refs):
        engine = make()
        answers = Answers(engine)
        assert engine.residency(refs["a"]) is Residency.REMOTE
        engine.pin(refs["a"])
        answers.until(lambda: engine.residency(refs["a"]) is Residency.GPU)
        answers.submit(greedy("r", prompt(5), adapter=refs["a"]))
        answers.step()
        (adapter,) = engine.adapters()
        assert (adapter.ref, adapter.leases, adapter.pinned) == (refs["a"], 1, True)
        assert engine.status().tiers[Residency.GPU].used_bytes > 0
        answers.all()
        engine.unpin(refs["a"].digest)
        engine.step()
        assert not engine.adapters()[0].pinned

    def test_an_adapter_evicted_before_its_request_runs_is_loaded_again(self, make, refs):
        """While the request waits for its turn, another adapter takes the space of its adapter."""
        # a has 6,144 elements and b 12,288
        engine = make(max_running=1, adapter_gpu_bytes=4 * 13_000)
        answers, a, b = Answers(engine), refs["a"], refs["b"]

        def on_gpu(ref):
            time.sleep(0.02)  # in each step, so that the requests outlast a slow load
            return engine.residency(ref) is Residency.GPU

        answers.submit(greedy("runs", prompt(5), max_tokens=500))
        answers.submit(greedy("waits", prompt(5), adapter=a))
        answers.until(lambda: on_gpu(a))
        time.sleep(GUARD_S)
        answers.submit(greedy("gone", prompt(5), adapter=b))
        answers.until(lambda: on_gpu(b))
        assert engine.residency(a) is Residency.HOST
        for name in ("runs", "gone"):
            engine.abort(name)
            del answers.pending[name]
        engine._wake.clear()  # from here on, only the load of a may wake the engine
        answers.all()

    @pytest.mark.parametrize(
        ("family", "overlap"),
        [("llama", False), ("qwen3_5_text", True)],
        indirect=["family"],
        scope="module",
    )
    def test_a_version_that_is_pushed_while_others_answer_changes_no_answer(
        self, make, refs, overlap
    ):
        """All ask one prompt: the old version, the new one that comes meanwhile, then the old one
        again, while each of the others has more to say.
        """
        engine, ids = make(overlap=overlap), prompt(5 * PAGE + 3)
        old = AdapterRef("acme", "support", 1, refs["a"].digest)
        new = AdapterRef("acme", "support", 2, refs["b"].digest)
        answers, asked = Answers(engine), {"before": old, "new": new, "after": old, "base": None}
        for name, ref in asked.items():
            answers.submit(greedy(name, ids, adapter=ref, max_tokens=40))
            answers.until(lambda name=name: answers.tokens.get((name, 0)))
        answers.all()
        for name, ref in asked.items():
            alone = Answers(make(overlap=overlap))
            alone.submit(greedy(name, ids, adapter=ref, max_tokens=40))
            alone.all()
            assert answers.of(name) == alone.of(name)
        assert answers.of("before") == answers.of("after") != answers.of("new")
        assert nothing_is_held(engine)

    def test_a_new_version_never_reads_the_old_versions_cache(
        self, make, shelf, refs, peft_folders
    ):
        answers = Answers(make())
        ids = prompt(3 * PAGE + 1)
        old = AdapterRef("acme", "support", 1, refs["a"].digest)
        new = AdapterRef("acme", "support", 2, refs["b"].digest)
        for name, ref in (("old", old), ("new", new), ("rolled back", old)):
            answers.submit(greedy(name, ids, adapter=ref))
            answers.all()
        assert answers.of("old") == answers.of("rolled back") != answers.of("new")


def check_segments(batch):
    """Check that segments are adjacent and in order, with each adapter once."""
    if batch.segments is None:
        return
    slots = batch.segments.slots.tolist()
    starts, lengths = batch.segments.starts.tolist(), batch.segments.lengths.tolist()
    assert len(set(slots)) == len(slots)
    assert starts[0] == 0
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert ends[:-1] == starts[1:]
    assert set(ends) <= set(batch.query_starts)
