"""A model over several machines computes what one machine does, bit for bit."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    architecture,
    open_float32,
    random_tokens,
    random_tree,
    save_checkpoint,
)
from fake_cuda import CUDA, fake_cuda
from gguf_toys import TOYS, save_toy
from hosts_rig import PLENTY, TOKEN, WORK, joins, offer_of, split_model, until

from specexec_cli.config import SamplingConfig, Tier, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding import batch
from specexec_cli.decoding.batch import Batch, BatchText, Seat
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest
from specexec_cli.drafting.learned import Learned
from specexec_cli.errors import CheckpointError, StreamError, WorkerError
from specexec_cli.hosts import joined, worker
from specexec_cli.hosts.kept_there import KeptThere
from specexec_cli.hosts.messages import PassOrder, body_of, stream_of
from specexec_cli.hosts.open_span import OtherRowsError
from specexec_cli.hosts.pool import HostPool
from specexec_cli.hosts.rows import SpanLog, SpanRows
from specexec_cli.hosts.under_way import UnderWay
from specexec_cli.hosts.wire import Wire, WireError
from specexec_cli.hosts.worker import OpenSpan
from specexec_cli.models import own_bits
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.resident_parts import SharedParts
from specexec_cli.models.spans import NoHead, NoTable, SpanLostError
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.hosts import HostEntry, HostsFile, in_waves, plan_of_span
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.memory import Work
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget, verify_together

ONE_MACHINE = {"gemma4_text"}  # its layers share keys, or read more than the residual stream
RECURRENT = ("falcon_h1", "lfm2", "nemotron_h", "qwen3_5", "qwen3_next")
KINDS = (
    "afmoe", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "falcon", "glm_moe_dsa", "gpt2",
    "gpt_neox", "llama4_text", "minimax_m2", "olmo2", "stablelm", *RECURRENT, *sorted(ONE_MACHINE),
)  # fmt: skip


def story(model: StreamedModel) -> list[torch.Tensor]:
    """The logits of a text that is begun, drafted, committed, cut, copied and shared."""
    text, tree = random_tokens(12), random_tree(9, 3)
    one, two = LocalTarget(model), LocalTarget(model)
    found = [one.verify(text[:7], tree)]
    path = [node for node in range(len(tree)) if tree.parents[node] == -1][:1]
    one.commit(path)
    found.append(one.verify(text[7:9], random_tree(5, 4)))
    one.commit([])
    one.crop(6)
    two.copy_rows(one, 5)
    found += verify_together([(one, text[9:], tree), (two, text[3:], DraftTree.empty())])
    one.commit([])
    two.commit([])
    one.crop(0)
    found.append(one.verify(text, DraftTree.empty()))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_split_model_has_the_bits_of_a_whole_one(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    whole = open_float32(tmp_path, "ram")
    layers = len(whole.layers)
    expected = story(whole)
    whole.close()
    starts = [1, 2] if layers > 2 else [1]
    with split_model(tmp_path, starts) as model:
        assert [passage.span.start for passage in model.others.passages] == starts
        for ours, theirs in zip(story(model), expected, strict=True):
            assert torch.equal(ours, theirs)


def side_by_side(model: StreamedModel, drafts: StreamedModel) -> list[list[int]]:
    """A text that is written while the prompt of another one comes in parts."""
    tree = TreeConfig(budget=8, max_depth=4, policy="fixed", past=False)
    sampler, learned = Sampler(SamplingConfig()), Learned()
    prompts = [random_tokens(12), random_tokens(200, 5)]
    seats = [
        Seat(LocalTarget(model), ModelDrafter(drafts, sampler, tree, 64, learned=learned))
        for _ in prompts
    ]
    together = Batch(Forest(drafts, tree, 2, learned), seats)
    texts = [
        BatchText(seat, sampler, prompt, 40, ())
        for seat, prompt in zip(seats, prompts, strict=True)
    ]
    together.step(texts[:1])
    while len(texts[1].context) < len(prompts[1]) + 8:
        together.step(texts)
    return [text.context[: len(prompt) + 8] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_draft_model_reads_prompts_while_other_machines_have_a_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_ROWS", 64)
    for folder, kind in (("target", name), ("draft", "llama")):
        save_checkpoint(tmp_path / folder, architecture(kind))
    with closing(open_float32(tmp_path / "draft", None)) as drafts:
        with closing(open_float32(tmp_path / "target", "ram")) as whole:
            expected = side_by_side(whole, drafts)
        feed, ways = Forest.feed, list[int]()

        def noted(forest: Forest, texts: Sequence[Any]) -> None:
            if texts:
                ways.append(len(model._waves._begun))  # type: ignore[union-attr]
            assert not own_bits._runs_within(), "of the target's layers none is under way"
            feed(forest, texts)

        monkeypatch.setattr(Forest, "feed", noted)
        with split_model(tmp_path / "target", [1]) as model:
            assert side_by_side(model, drafts) == expected
    assert len(ways) == 3, "parts of the prompt but the last"
    assert min(ways) > 0, "rows are on their way"


def test_every_machine_keeps_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    found = []
    for eight_bit in (True, False):
        whole = open_float32(tmp_path, "ram", eight_bit_kv=eight_bit)
        found.append(story(whole))
        whole.close()
    with split_model(tmp_path, [1, 2], work=replace(WORK, eight_bit_kv=True)) as model:
        for ours, theirs, full in zip(story(model), *found, strict=True):
            assert torch.equal(ours, theirs)
            assert not torch.equal(ours, full)


def test_layers_that_do_not_fit_a_workers_memory_wait_on_its_ssd(tmp_path: Path) -> None:
    config = architecture("llama")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 6, 256, 4096
    save_checkpoint(tmp_path, config)
    whole = open_float32(tmp_path, "ram")
    expected = story(whole)
    whole.close()
    said: list[str] = []
    small = Machine(ram_bytes=140_000_000, base_bytes=0)
    with split_model(tmp_path, [2], machines=[small], notice=said.append) as model:
        assert any("(ssd)" in line for line in said), said
        for ours, theirs in zip(story(model), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_another_kind_has_its_bits_or_is_refused(name: str, tmp_path: Path) -> None:
    save_toy(TOYS[name], tmp_path)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = story(whole) if name not in ONE_MACHINE else []
    if not expected:
        with (
            pytest.raises(CheckpointError, match="one machine alone"),
            split_model(tmp_path, [1]) as model,
        ):
            story(model)
        return
    with split_model(tmp_path, [1]) as model:
        for ours, theirs in zip(story(model), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_text_over_two_machines_is_cut_where_one_machines_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is read again: the states that one machine keeps are those of the other."""
    save_toy(TOYS[name], tmp_path)
    texts = [random_tokens(40), random_tokens(60)]

    def told(model: StreamedModel) -> list[tuple[torch.Tensor, int]]:
        one, two = LocalTarget(model), LocalTarget(model)
        one.keep_at(11)
        found = []
        for stop in (30, 40):
            found.append((one.verify(texts[0][len(one.tokens) : stop], random_tree(9, 3)), stop))
            one.commit([0])
        for length in (12, 49, 20):
            one.crop(length)
            two.copy_rows(one, length)
            for each in (one, two):
                rest = texts[1][len(each.tokens) : 50]
                found.append((each.verify(rest, random_tree(5, 4)), len(each.tokens)))
                each.commit([])
        return found

    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = told(whole)
    run, passes = OpenSpan.run, list[int]()

    def counted(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        passes.append(order.hidden.shape[1])
        return run(span, order)

    monkeypatch.setattr(OpenSpan, "run", counted)
    with split_model(tmp_path, [1]) as model:
        for (ours, left), (theirs, as_left) in zip(told(model), expected, strict=True):
            assert left == as_left
            assert torch.equal(ours, theirs)
    assert len(passes) == len(expected)


def test_a_span_with_other_rows_than_the_first_machine_has_the_text_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(12), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    run, spoiled = OpenSpan.run, list[int]()

    def forgets(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        if order.texts[0][1].prefix_len == 8 and not spoiled:
            spoiled.append(1)
            order = replace(order, done=[*order.done, ("crop", order.texts[0][0], 5)])
        return run(span, order)

    monkeypatch.setattr(OpenSpan, "run", forgets)
    with split_model(tmp_path, [1]) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        assert torch.equal(target.verify(text[8:], tree), expected)
        assert spoiled


@pytest.mark.parametrize("how", ["not done", "not read"])
def test_what_an_order_that_failed_has_not_done_has_texts_read_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the text that was to take its place, a text would be believed."""
    save_checkpoint(tmp_path, architecture("llama"))
    texts, tree, said = [random_tokens(8, 1), random_tokens(8, 2)], random_tree(9, 3), list[str]()
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify([*texts[1], 7], tree)
    do = OpenSpan._do

    def fails(span: OpenSpan, what: str, values: Sequence[int]) -> None:
        if what == "keep":
            raise ValueError("there is no such segment")
        do(span, what, values)

    def unread(head: dict) -> None:
        monkeypatch.undo()
        raise WireError("what was done to texts cannot be read")

    with split_model(tmp_path, [1]) as model:
        one, other = targets = [LocalTarget(model) for _ in texts]
        for target, text in zip(targets, texts, strict=True):
            target.verify(text, DraftTree.empty())
            target.commit([])
        (passage,) = model.others.passages
        passage.keeps = True
        if how == "not done":
            monkeypatch.setattr(OpenSpan, "_do", fails)
        else:
            monkeypatch.setattr(worker, "done_of", unread)
        one.state.layers[1].keep(0, 8, 0)
        one.copy_rows(other, 8)
        KeptThere([passage], said.append).flush(20)
        assert [line.startswith("host-0: ") for line in said] == [True]
        assert not passage.keeps
        assert torch.equal(one.verify([7], tree), expected)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_order_that_lies_about_tuples_is_refused(name: str, first: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    text, tree, head = random_tokens(12), random_tree(9, 3), PassOrder.head
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)

    def lies(order: PassOrder) -> dict:
        return {**head(order), "tuples": not order.tuples}

    with split_model(tmp_path, [first]) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        with (
            mock.patch.object(PassOrder, "head", lies),
            pytest.raises(WorkerError, match="give tuples here and not on the first machine"),
        ):
            target.verify(text[8:], tree)
        assert torch.equal(target.verify(text[8:], tree), expected)


def test_the_first_recurrent_layer_stays_on_the_first_machine(tmp_path: Path) -> None:
    kinds = ["full_attention", *["linear_attention"] * 3]
    toy = TOYS["qwen3_next"]
    save_toy(replace(toy, options={**toy.options, "layer_types": kinds}), tmp_path)
    with (
        pytest.raises(CheckpointError, match=r"layer 1 is the first .* fewer 'layers'"),
        split_model(tmp_path, [1]),
    ):
        pass


def test_a_machine_that_is_lost_again_while_a_text_is_read_again_loses_nothing(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(12), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    with split_model(tmp_path, [1]) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        (passage,) = model.others.passages
        losses, through = iter(range(2)), model.layers[1].elsewhere

        def breaks(hidden: torch.Tensor, tuples: bool) -> torch.Tensor:
            if next(losses, None) is None:
                return through(hidden, tuples)
            passage.begin_to_open()  # so that every row is gone there
            passage.opened()
            raise SpanLostError("host-0 is lost")

        model.layers[1].elsewhere = breaks
        assert torch.equal(target.verify(text[8:], tree), expected)
        target.commit([])
        assert target.tokens == text


@pytest.mark.parametrize("how", ["between two passes", "after an order that cannot be sent"])
def test_a_worker_that_is_started_again_loses_nothing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(12), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    with split_model(tmp_path, [1]) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        (passage,) = model.others.passages

        def starts_again() -> None:
            joins(model.others, offer_of(read_checkpoint(tmp_path), "host-0"))
            until(lambda: passage.joined.lost is not None)

        def runs_out(hidden: torch.Tensor) -> list[memoryview]:
            monkeypatch.setattr(joined, "body_of", body_of)
            threading.Thread(target=starts_again).start()
            raise MemoryError

        if how == "between two passes":
            starts_again()
        else:
            monkeypatch.setattr(joined, "body_of", runs_out)
        found: list[torch.Tensor] = []
        pass_ = threading.Thread(
            target=lambda: found.append(target.verify(text[8:], tree)), daemon=True
        )
        pass_.start()
        pass_.join(30)
        assert found, "nobody answers any more"
        assert torch.equal(found[0], expected)


@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_a_span_that_could_not_be_opened_again_is_opened_by_the_next_pass(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(12), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    with split_model(tmp_path, [1]) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        (passage,) = model.others.passages
        joins(model.others, offer_of(read_checkpoint(tmp_path), "host-0"))
        until(lambda: passage.joined.lost is not None)

        def fails(*given: object) -> None:
            raise KeyboardInterrupt if how == "interrupted" else StreamError("the disk is gone")

        with monkeypatch.context() as patch:
            if how == "interrupted":
                patch.setattr(passage, "begin_to_open", fails)
            else:
                patch.setattr(worker, "OpenSpan", fails)
            with pytest.raises((KeyboardInterrupt, WorkerError)):
                target.verify(text[8:], tree)
        assert torch.equal(target.verify(text[8:], tree), expected)


def ends(model: StreamedModel, name: str) -> None:
    """Ends the connection to a worker, which does not come back."""
    for passage in model.others.passages:
        if passage.name == name:
            passage.joined.close()


def test_a_machine_without_room_for_anothers_layers_ends_the_text_which_may_go_on_later(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(12), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    needed = plan_of_span(
        checkpoint_bytes(read_checkpoint(tmp_path)), range(2, 3), WORK, PLENTY
    ).peak_ram_bytes
    tight = replace(PLENTY, ram_bytes=PLENTY.ram_for(needed))
    with split_model(tmp_path, [1, 2], machines=[PLENTY, tight], wait_s=2) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        ends(model, "host-0")
        told = r"'host-0' did not join .* no other host: host-1: .* needs"
        with pytest.raises(WorkerError, match=told) as error:
            target.verify(text[8:], tree)
        assert error.value.exit_code == 9
        worker_ = joins(model.others, offer_of(read_checkpoint(tmp_path), "host-0"))
        assert torch.equal(target.verify(text[8:], tree), expected)
        assert worker_.is_alive()


def test_a_takeover_that_ctrl_c_ends_leaves_no_layers_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(12), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    opened = list[weakref.ref]()

    class Watched(OpenSpan):
        """A span that can be told to be closed."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(weakref.ref(self))

    with split_model(tmp_path, [1, 2], wait_s=1) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        ends(model, "host-0")
        _, other = model.others.passages

        def interrupted() -> None:
            until(lambda: bool(opened))
            raise KeyboardInterrupt

        monkeypatch.setattr(worker, "OpenSpan", Watched)
        with monkeypatch.context() as patch:
            patch.setattr(other.joined, "answer", interrupted)
            with pytest.raises(KeyboardInterrupt):
                target.verify(text[8:], tree)
        until(lambda: gc.collect() >= 0 and opened[0]() is None, 10)
        assert torch.equal(target.verify(text[8:], tree), expected)
        assert len(opened) == 2


def test_a_host_is_booked_with_the_memory_that_it_plans_itself(tmp_path: Path) -> None:
    """Layers that waited on the lost machine's SSD are in the RAM of the one with room."""
    config = architecture("llama")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 7, 256, 4096
    save_checkpoint(tmp_path, config)
    sizes = checkpoint_bytes(read_checkpoint(tmp_path))
    small, taken = Machine(ram_bytes=140_000_000, base_bytes=0), {}
    for at, span in enumerate([range(1, 5), range(6, 7)]):
        taken[at] = plan_of_span(sizes, span, WORK, PLENTY).peak_ram_bytes
    assert plan_of_span(sizes, range(1, 5), WORK, small).peak_ram_bytes < taken[0]
    with split_model(tmp_path, [1, 5, 6], machines=[small], wait_s=1) as model:
        target = LocalTarget(model)
        for name in ("host-0", "host-1"):
            ends(model, name)
        target.verify(random_tokens(8), DraftTree.empty())
        first, second, third = model.others.passages
        assert [each.name for each in (first, second, third)] == ["host-2"] * 3
        assert first.most == (PLENTY.ram_bytes - taken[1], 0)
        assert second.most == (PLENTY.ram_bytes - taken[1] - taken[0], 0)


@pytest.mark.parametrize("told", [None, "much", True, -1])
def test_a_worker_that_tells_no_memory_of_its_layers_is_one_line(
    told: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    receive = Wire.receive

    def spoiled(wire: Wire, *most: float) -> tuple[dict, bytearray]:
        head, body = receive(wire, *most)
        return ({**head, "ram": told} if head["kind"] == "ready" else head), body

    monkeypatch.setattr(Wire, "receive", spoiled)
    with (
        pytest.raises(WorkerError, match=f"host-0 tells {told!r} and 0 as RAM and VRAM"),
        split_model(tmp_path, [1]),
    ):
        pass


@pytest.mark.parametrize("told", [None, 5, "much", "0" * 63, "0" * 65, "G" * 64])
def test_a_worker_that_tells_no_hash_of_its_arithmetic_is_one_line(
    told: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    monkeypatch.setattr(worker, "arithmetic_of", lambda device: told)
    with (
        pytest.raises(WorkerError, match=r"host-0 tells .* as what its rows' bits depend on"),
        split_model(tmp_path, [1]),
    ):
        pass


def test_a_worker_that_is_lost_whenever_its_link_is_timed_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    tries = count()

    def lost(self: joined.Joined) -> None:
        assert next(tries) < 500, "without end"
        time.sleep(0.01)
        raise SpanLostError(f"{self.name} is lost: again")

    monkeypatch.setattr(joined.Joined, "timed", lost)
    with (
        pytest.raises(WorkerError, match="host-0 is lost: again, again and again: run `specexec"),
        split_model(tmp_path, [1], wait_s=0.5),
    ):
        pass


def test_a_worker_that_is_lost_whenever_its_layers_are_opened_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    tries = count()

    def lost(passage: joined.SpanPassage) -> str:
        passage.joined.answer()
        passage.joined.close()
        assert next(tries) < 60, "without end"
        joins(model.others, offer_of(read_checkpoint(tmp_path), "host-0"))
        until(lambda: model.others._joined["host-0"].lost is None)
        raise SpanLostError("host-0 is lost: again")

    with split_model(tmp_path, [1], wait_s=2) as model:
        target = LocalTarget(model)
        model.others.passages[0].joined.close()
        joins(model.others, offer_of(read_checkpoint(tmp_path), "host-0"))
        until(lambda: model.others._joined["host-0"].lost is None)
        monkeypatch.setattr(joined.SpanPassage, "opened", lost)
        with pytest.raises(WorkerError, match=r"again\. Its layers have room on no other host"):
            target.verify(random_tokens(8), DraftTree.empty())


def test_a_host_with_several_spans_is_waited_for_once_and_told_how_its_heir_rounds(
    tmp_path: Path,
) -> None:
    config = architecture("llama")
    config.num_hidden_layers = 4
    save_checkpoint(tmp_path, config)
    said, wait_s = list[tuple[float, str]](), 5

    def told(text: str) -> None:
        said.append((time.monotonic(), text))

    with split_model(tmp_path, [1, 2, 3], wait_s=wait_s, notice=told) as model:
        target = LocalTarget(model)
        # as two machines whose CPUs round alike, and one that does not
        model.others.passages[2].joined.hello["rounding"] = ["another way"]
        for lost in ("host-1", "host-0"):
            ends(model, lost)
            said.clear()
            target.crop(0)
            target.verify(random_tokens(8), DraftTree.empty())
            lines = [line for _, line in said]
            by = "host-0" if lost == "host-1" else "host-2"
            assert any(f"goes on with {by}" in line for line in lines), lines
            assert ("rounds products otherwise than host-0" in lines[-1]) == (by == "host-2")
            assert not any("from run to run" in line for line in lines)
        assert sum("waiting up to 5 s" in line for line in lines) == 1
        first, second = (at for at, line in said if "has layers" in line)
        assert second - first < wait_s


@pytest.mark.parametrize("rounding", ["the same way", "another way"])
def test_a_worker_that_comes_back_on_another_cpu_is_told(rounding: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, said = random_tokens(12), list[str]()
    with split_model(tmp_path, [1], notice=said.append) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        (passage,) = model.others.passages
        passage.joined.hello["rounding"] = ["the same way"]
        joins(model.others, offer_of(read_checkpoint(tmp_path), "host-0", rounding=[rounding]))
        until(lambda: passage.joined.lost is not None)
        target.verify(text[8:], DraftTree.empty())
    assert said[-1] == "host-0 is back, and the text goes on"
    told = [line for line in said if "rounds products otherwise than before" in line]
    assert len(told) == (rounding == "another way")


def test_no_rows_of_a_pass_stay_in_memory_behind_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    rows = (1, 41, architecture("llama").hidden_size)

    def alive() -> int:
        return sum(type(each) is torch.Tensor and each.shape == rows for each in gc.get_objects())

    with split_model(tmp_path, [1]) as model:
        target = LocalTarget(model)
        target.verify(random_tokens(41), DraftTree.empty())
        until(lambda: not alive(), 5)


def test_texts_that_lose_a_machine_together_are_read_again_one_at_a_time(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    texts, tree = [random_tokens(12), random_tokens(9)], random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = [LocalTarget(whole).verify(text, tree) for text in texts]
    with split_model(tmp_path, [1]) as model:
        targets = [LocalTarget(model) for _ in texts]
        for target, text in zip(targets, texts, strict=True):
            target.verify(text[:-2], DraftTree.empty())
            target.commit([])
        (passage,) = model.others.passages
        joins(model.others, offer_of(read_checkpoint(tmp_path), "host-0"))
        until(lambda: passage.joined.lost is not None)
        sizes, through = list[int](), model.layers[1].elsewhere

        def counted(hidden: torch.Tensor, tuples: bool) -> torch.Tensor:
            found = through(hidden, tuples)
            sizes.append(hidden.shape[1])
            return found

        model.layers[1].elsewhere = counted
        found = verify_together(
            [(target, text[-2:], tree) for target, text in zip(targets, texts, strict=True)]
        )
        assert sizes == [10, 7, 2 * (2 + len(tree))]
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("times", [1, 2])
def test_after_ctrl_c_in_a_pass_the_answer_that_comes_late_is_dropped(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(12), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    with split_model(tmp_path, [1]) as model:
        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        (passage,) = model.others.passages
        run, begun, goes_on = OpenSpan.run, threading.Event(), threading.Event()

        def held(span: OpenSpan, order: PassOrder) -> torch.Tensor:
            begun.set()
            assert goes_on.wait(30)
            return run(span, order)

        def interrupted(*given: object) -> None:
            assert begun.wait(30)
            raise KeyboardInterrupt

        monkeypatch.setattr(OpenSpan, "run", held)
        with monkeypatch.context() as patch:
            patch.setattr(UnderWay, "wait", interrupted)
            for _ in range(times):  # the first pass has begun there, the second one waits behind it
                with pytest.raises(KeyboardInterrupt):
                    target.verify(text[8:], random_tree(30, 5))
        begin = passage.joined.begin

        def begin_and_go_on(*order: object) -> None:
            begin(*order)
            goes_on.set()

        monkeypatch.setattr(passage.joined, "begin", begin_and_go_on)
        assert torch.equal(target.verify(text[8:], tree), expected)


def test_the_answer_to_an_interrupted_pass_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    bodies = list[weakref.ref]()
    receive = Wire.receive

    class Body(bytearray):
        """Rows that came, which can be told to be gone."""

    def watched(wire: Wire, *most: float) -> tuple[dict, bytearray]:
        head, body = receive(wire, *most)
        if head["kind"] != "rows":
            return head, body
        rows = Body(body)
        bodies.append(weakref.ref(rows))
        return head, rows

    with split_model(tmp_path, [1]) as model:
        monkeypatch.setattr(Wire, "receive", watched)
        target = LocalTarget(model)

        def interrupted(*given: object) -> None:
            until(lambda: bool(bodies))  # it is there, or comes right now
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(UnderWay, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                target.verify(random_tokens(8), DraftTree.empty())
        until(lambda: bodies[0]() is None, 5)


def test_the_size_of_a_session_beyond_all_bounds_is_one_line(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    for name, value in (("batch", 10**30), ("chunk_rows", (1 << 24) + 1)):
        work = replace(WORK, **{name: value})
        with (
            pytest.raises(WorkerError, match=f"host-0: '{name}' of the session is not between"),
            split_model(tmp_path, [1], work=work, planned=WORK),
        ):
            pass


@pytest.mark.parametrize(
    ("done", "prefix_len", "told"),
    [
        ([], 100, "other rows here than the 100"),
        ([("crop", 0, 3)], 8, "other rows here than the 8"),
        ([("crop", 0, -3)], 8, "cannot be done"),
        ([("commit", 0, 8, 90)], 8, "cannot be done"),
        ([("commit", 0, 9)], 9, "cannot be done"),
        ([("crop", 0)], 8, "cannot be done"),
        ([("commit", 0)], 8, "cannot be done"),
        ([("commit", 0, 6, 7, 6)], 8, "cannot be done"),
        ([("commit", 0, 6, 7, 7)], 8, "cannot be done"),
        ([("commit", 0, 6, 5)], 8, "cannot be done"),
        ([("commit", 0, 6, 5, 7)], 8, "cannot be done"),
    ],
)
def test_a_span_is_run_behind_the_rows_that_the_first_machine_has_and_no_others(
    done: list[tuple], prefix_len: int, told: str, tmp_path: Path
) -> None:
    config = architecture("llama")
    save_checkpoint(tmp_path, config)
    rest, ends = range(1, 3), SharedParts(ends=(NoTable(config.hidden_size), NoHead()))
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=["ram"] * 2, span=rest)
    with closing(spec.open(read_checkpoint(tmp_path), shared=ends)) as model:
        span = OpenSpan(model, rest, 64)

        def passed(
            rows: int, before: int, done: list[tuple], width: int = config.hidden_size
        ) -> torch.Tensor:
            texts = [(0, PassRows.chain(random_tokens(rows), before))]
            hidden = torch.ones(1, rows, width)
            return span.run(PassOrder(first=1, done=done, texts=texts, tuples=False, hidden=hidden))

        passed(8, 0, [("reserve", 0, 10**15)])  # more than any text has, and no reason to fail
        expected = passed(2, 8, [("commit", 0, 8)])
        with pytest.raises(WireError, match=told):
            passed(2, prefix_len, [("crop", 0, 8), *done])
        with pytest.raises(WireError, match="rows of 7 numbers came"):
            passed(2, 8, [], width=7)
        if told == "cannot be done":  # nor was what came behind it
            for _ in range(2):
                with pytest.raises(OtherRowsError, match="not all known"):
                    passed(2, 8, [("crop", 0, 8)])
            passed(8, 0, [("forget",)])
            assert torch.equal(passed(2, 8, [("commit", 0, 8)]), expected)
        elif ("crop", 0, 3) not in done:
            assert torch.equal(passed(2, 8, [("crop", 0, 8)]), expected)


LONG = Work(context_tokens=512, budget=128)
IN_WAVES = (
    "llama", "mixtral", "gemma3", "cohere2", "deepseek_v3", "falcon_h1", "lfm2", "qwen3_next",
)  # fmt: skip


def long_story(model: StreamedModel) -> list[torch.Tensor]:
    """The logits of passes whose rows go in waves: a prompt, two texts with trees, and what a text
    that was cut lacks."""
    text = random_tokens(300)
    one, two = LocalTarget(model), LocalTarget(model)
    found = [one.verify(text[:200], random_tree(9, 3))]
    one.commit([0])
    trees = random_tree(70, 4), random_tree(60, 5)
    found += verify_together([(one, text[200:210], trees[0]), (two, text[:90], trees[1])])
    one.commit([])
    two.commit([])
    found += verify_together([(one, text[210:211], trees[1]), (two, text[90:91], trees[0])])
    one.commit([])
    two.commit([])
    one.crop(100)
    found.append(one.verify(text[len(one.tokens) :], trees[0]))
    return found


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[PassOrder]:
    """What machines were told to compute, as it came."""
    run, found = OpenSpan.run, list[PassOrder]()

    def noted(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        found.append(order)
        return run(span, order)

    monkeypatch.setattr(OpenSpan, "run", noted)
    return found


@pytest.mark.parametrize("name", IN_WAVES)
def test_passes_in_waves_have_the_bits_of_one_machine(
    name: str, orders: list[PassOrder], tmp_path: Path
) -> None:
    if name in ARCHITECTURES:
        save_checkpoint(tmp_path, architecture(name))
    else:
        save_toy(TOYS[name], tmp_path)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected, layers = long_story(whole), len(whole.layers)
    starts = [1, 2] if layers > 2 else [1]
    with split_model(tmp_path, starts, work=LONG) as model:
        for ours, theirs in zip(long_story(model), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert len(orders) >= 2 * len(starts) * 4  # passes


@pytest.mark.parametrize("features", [(), (1, 2, 3, 4, 5)])
def test_rows_that_a_trained_head_reads_are_kept_of_every_wave(
    features: tuple[int, ...], orders: list[PassOrder], tmp_path: Path
) -> None:
    """Those in front of layers on this machine, on another, between two, and behind the last."""
    config = architecture("llama")
    config.num_hidden_layers = 5
    save_checkpoint(tmp_path, config)
    work = replace(WORK, features=features or None)
    texts = [(random_tokens(150), random_tree(9, 3)), (random_tokens(1, 5), random_tree(80, 4))]

    def kept(model: StreamedModel) -> list[torch.Tensor]:
        model.kept_features = features
        targets = [LocalTarget(model) for _ in texts]
        verify_together([(target, *text) for target, text in zip(targets, texts, strict=True)])
        for target in targets:
            target.commit([0])
        rows = [(each.state.layers[-1], len(each.tokens)) for each in targets]
        return [part for layer, count in rows for part in layer.kept_rows(0, count)]

    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = kept(whole)
    with split_model(tmp_path, [1, 3], work=work) as model:
        for ours, theirs in zip(kept(model), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert len(orders) >= 4


@pytest.mark.parametrize("name", ["prompt", "texts"])
def test_every_machine_computes_while_the_others_do(name: str, tmp_path: Path) -> None:
    """Each waits in its layers for another one to be in its own, with other rows."""
    save_checkpoint(tmp_path, architecture("llama"))
    texts = [(random_tokens(200), DraftTree.empty())]
    if name == "texts":
        texts = [(random_tokens(1), random_tree(80, seed)) for seed in range(3)]
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = verify_together([(LocalTarget(whole), *text) for text in texts])
    run, waves = OpenSpan.run, {1: count(), 2: count()}
    # the first machine's second wave and host-0's first, and host-0's second and host-1's first
    meetings = [threading.Barrier(2, timeout=60) for _ in range(2)]
    own = count()

    def meets(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        wave = next(waves[order.first])
        if order.first == 1 and wave < 2:
            meetings[wave].wait()
        if order.first == 2 and not wave:
            meetings[1].wait()
        return run(span, order)

    def on_layer(index: int) -> None:
        if index == 0 and next(own) == 1:
            meetings[0].wait()

    with mock.patch.object(OpenSpan, "run", meets), split_model(tmp_path, [1, 2]) as model:
        model.on_layer = on_layer
        found = verify_together([(LocalTarget(model), *text) for text in texts])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not any(each.broken for each in meetings)
    assert min(next(own), next(waves[1]), next(waves[2])) >= 3


def test_a_machine_that_streams_against_the_plan_reads_its_weights_once_for_a_pass(
    orders: list[PassOrder], tmp_path: Path
) -> None:
    config = architecture("llama")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 6, 256, 4096
    save_checkpoint(tmp_path, config)
    small = Machine(ram_bytes=140_000_000, base_bytes=0)
    with split_model(tmp_path, [2], machines=[small], planned_machine=PLENTY) as model:
        LocalTarget(model).verify(random_tokens(200), DraftTree.empty())
    assert [each.hidden.shape[1] for each in orders] == [200]


@pytest.mark.parametrize("wave", [1, 2, 3])
def test_ctrl_c_in_a_wave_leaves_the_text_as_it_was(wave: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(220), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    with split_model(tmp_path, [1, 2]) as model:
        target, passed = LocalTarget(model), count(1)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])

        def interrupts(index: int) -> None:
            if index == 0 and next(passed) == wave:
                raise KeyboardInterrupt

        model.on_layer = interrupts
        with pytest.raises(KeyboardInterrupt):
            target.verify(text[8:], tree)
        assert target.tokens == text[:8]
        assert torch.equal(target.verify(text[8:], tree), expected)


def test_rows_that_nobody_waits_for_go_to_no_further_machine(tmp_path: Path) -> None:
    """Nor do later waves go to the first one, which has yet to compute them."""
    save_checkpoint(tmp_path, architecture("llama"))
    text = random_tokens(200)
    run, begun, goes_on = OpenSpan.run, threading.Event(), threading.Event()
    sizes: dict[int, list[int]] = {1: [], 2: []}

    def held(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        begun.set()
        assert goes_on.wait(30)
        sizes[order.first].append(order.hidden.shape[1])
        return run(span, order)

    def interrupted(*given: object) -> None:
        assert begun.wait(30)
        raise KeyboardInterrupt

    with mock.patch.object(OpenSpan, "run", held), split_model(tmp_path, [1, 2]) as model:
        target = LocalTarget(model)
        with mock.patch.object(UnderWay, "wait", interrupted), pytest.raises(KeyboardInterrupt):
            target.verify(text, DraftTree.empty())
        goes_on.set()
        target.verify(text[:9], DraftTree.empty())
    assert sizes == {1: [67, 9], 2: [9]}


@pytest.mark.parametrize("wave", range(3))
@pytest.mark.parametrize("first", [1, 2])
def test_a_wave_that_fails_costs_no_text_its_rows(wave: int, first: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    texts, tree = [random_tokens(9, 1), random_tokens(220, 2)], random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = [LocalTarget(whole).verify(text, tree) for text in texts]
    run, starts, began = OpenSpan.run, list[int](), count()

    def gone(index: int) -> None:
        raise StreamError("the SSD is gone")

    def fails(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        if order.first == first and next(began) == wave:
            with mock.patch.object(span.model.context, "on_layer", gone):
                return run(span, order)
        return run(span, order)

    def counted(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        starts.extend(rows.prefix_len for _, rows in order.texts)
        return run(span, order)

    with split_model(tmp_path, [1, 2]) as model:
        targets = [LocalTarget(model) for _ in texts]
        for target, text in zip(targets, texts, strict=True):
            target.verify(text[:8], DraftTree.empty())
            target.commit([])
        with (
            mock.patch.object(OpenSpan, "run", fails),
            pytest.raises(WorkerError, match="the SSD is gone"),
        ):
            targets[1].verify(texts[1][8:], tree)
        with mock.patch.object(OpenSpan, "run", counted):
            for target, text, logits in zip(targets, texts, expected, strict=True):
                assert torch.equal(target.verify(text[8:], tree), logits)
    assert starts.count(8) >= 4
    assert 0 not in starts  # no text is read again


def test_modelling_code_sees_the_rows_of_earlier_waves_on_every_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    forward, seen = StreamedModel.forward, list[tuple[int, int]]()

    def noted(model: StreamedModel, rows: PassRows, state: ModelState, *wanted) -> torch.Tensor:
        seen.append((rows.prefix_len, state.get_seq_length()))
        return forward(model, rows, state, *wanted)

    monkeypatch.setattr(StreamedModel, "forward", noted)
    with split_model(tmp_path, [1, 2]) as model:
        LocalTarget(model).verify(random_tokens(200), DraftTree.empty())
    assert sum(before > 0 for before, _ in seen) == 4  # of two later waves, on two machines
    assert all(before == there for before, there in seen)


@pytest.mark.parametrize("at", range(6))
def test_a_machine_that_is_lost_in_any_wave_loses_nothing(at: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    text, tree = random_tokens(220), random_tree(9, 3)
    with closing(open_float32(tmp_path, "ram")) as whole:
        expected = LocalTarget(whole).verify(text, tree)
    run, begun = OpenSpan.run, count()
    with split_model(tmp_path, [1, 2]) as model:

        def lost(span: OpenSpan, order: PassOrder) -> torch.Tensor:
            if next(begun) == at:
                name = model.others.passages[order.first - 1].name
                ends(model, name)
                joins(model.others, offer_of(read_checkpoint(tmp_path), name))
            return run(span, order)

        target = LocalTarget(model)
        target.verify(text[:8], DraftTree.empty())
        target.commit([])
        with mock.patch.object(OpenSpan, "run", lost):
            assert torch.equal(target.verify(text[8:], tree), expected)
        target.commit([])
        assert target.tokens == text
    assert next(begun) > at + 3


def test_a_worker_and_a_session_of_other_versions_refuse_each_other(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    file = HostsFile(listen="127.0.0.1:0", wait_s=60, hosts=(HostEntry(name="host-0"),))
    with closing(HostPool(file, TOKEN.encode(), lambda line: None)) as pool:
        old = offer_of(read_checkpoint(tmp_path), "host-0", protocol=None, arithmetic=None)
        connected = socket.create_connection(("127.0.0.1", pool.port))
        session = worker.Session(Wire(connected, TOKEN.encode(), dialled=True), old, print)
        with pytest.raises(WorkerError, match="start a worker of this version there"):
            session.run()
    with (
        mock.patch.object(joined, "PROTOCOL", 1),
        pytest.raises(WorkerError, match="host-0: the session is of another version"),
        split_model(tmp_path, [1]),
    ):
        pass


class Refuses:
    """A passage to a machine that has other rows of every text."""

    def __init__(self) -> None:
        self.name, self.log = "host-0", SpanLog()

    def begin(self, wave, rows: torch.Tensor, then, wanted) -> None:
        then(({"kind": "anew"}, bytearray()))

    def read(self, answer, shape: torch.Size) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        raise joined.ForgottenError("host-0: a text has other rows here")


def test_a_machine_with_other_rows_drops_them_also_if_nobody_waited_for_that_wave() -> None:
    """So that one more pass is not lost to find out again."""
    passage = Refuses()
    way = UnderWay([passage], [None], torch.zeros(1, 2, 4))
    for _ in range(2):
        way.give_up()
    assert passage.log.take(passage.log.begin()) == [("forget",)]


class Direct:
    """The only passage to an opened span in this thread, by way of what would be sent, and the rows
    that went through it."""

    as_planned = True

    def __init__(self, opened: OpenSpan, span: range) -> None:
        self.span, self.passages = span, [self]
        self._opened, self._log = opened, SpanLog()

    def new_rows(self) -> SpanRows:
        return SpanRows(self._log)

    def send(self, parts, rows, hidden: torch.Tensor, tuples: bool, before) -> Direct:
        texts = [(each.number, part) for each, part in zip(rows[0], parts, strict=True)]
        done = self._log.take(self._log.begin())
        order = PassOrder(
            first=self.span.start, done=done, texts=texts, tuples=tuples, hidden=hidden
        )
        told = PassOrder.read(order.head(), bytearray(b"".join(body_of(hidden))))
        found = self._opened.run(told)
        (body,) = body_of(found)
        self._rows = stream_of({"shape": list(found.shape)}, bytearray(body))
        return self

    def wait(self, at: int) -> None:
        """They are there already."""

    def rows(self) -> torch.Tensor:
        return self._rows

    def beside(self) -> dict[int, torch.Tensor]:
        return {}

    def give_up(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self._opened.model.close()


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3"])
def test_spans_on_gpus_compute_what_one_gpu_does(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    checkpoint = read_checkpoint(tmp_path)
    hidden = architecture(name).hidden_size
    last = architecture(name).num_hidden_layers

    def opened(tiers: list[Tier], span: range | None = None, **more) -> StreamedModel:
        spec = ModelSpec(device=CUDA, dtype=torch.float32, tiers=tiers, span=span)
        return spec.open(checkpoint, **more)

    with fake_cuda(triton=False):
        with closing(opened(["resident"] * last)) as whole:
            expected = [each.cpu() for each in story(whole)]
        rest, ends = range(1, last), SharedParts(ends=(NoTable(hidden), NoHead()))
        second = opened(["ram", *["ssd"] * (last - 2)], rest, shared=ends)
        with closing(opened(["resident"], range(1))) as first:
            first.pass_on(
                Direct(OpenSpan(second, rest, 64), rest), lambda texts: in_waves(texts, 1 << 20)
            )
            found = [each.cpu() for each in story(first)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
