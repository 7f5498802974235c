"""DCCFSSL round by round: the server's table and weights by hand, and whole federations through the apps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from torch import Tensor

from server_app.roster import Roster
from server_app.strategies.base import State
from server_app.strategies.dccfssl import DCCFSSL
from server_app.strategies.fedavg import FedAvg
from task.messages import Download, Expected, NodeReport, PrototypeSet, Upload
from task.payload import decode_download, decode_upload, encode_download, encode_upload
from tests import contents
from tests.client_app.test_training import session
from tests.shared_model import run_of
from tests.stripes import TINY, messages, model_of, rows_of, run, same, state_of, tensors

# Client 0 has labels; o^i and v^i of two classes, as (class, vector, count).
TABLE = {
    0: [(0, (1.0, 0.0), 10), (2, (0.0, 1.0), 4)],
    1: [(0, (0.0, 1.0), 5), (1, (1.0, 1.0), 3)],
    2: [(0, (1.0, 1.0), 5), (1, (-1.0, 1.0), 1), (2, (1.0, 0.0), 2)],
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def strategy(kind: Any, labelled: int = 1, clients: int = 3, **settings: Any) -> Any:
    """A strategy of a run with a model of one tensor and one counter, features of width 2, three classes."""
    of = session(f"algorithm=dccfssl {TINY} algorithm.evaluation=clients")
    found = kind(**settings)
    found.run = run_of(of)
    roles = ["labelled"] * labelled + ["unlabelled"] * (clients - labelled)
    reports = {i: NodeReport(i, clients, "x", 1, 2, ("a", "b", "c"), "cpu", (), role=roles[i]) for i in range(clients)}
    found.run.roster = Roster(reports, dict.fromkeys(reports, 1))
    return found


def empty(clients: int = 3) -> State:
    return {
        "model/w": torch.tensor([9.0]),
        "model/steps": torch.tensor(0),
        "protos_CK": torch.zeros(3, 2),
        "known_C": torch.zeros(3, dtype=torch.bool),
        "store_MCK": torch.zeros(clients, 3, 2),
        "counts_MC": torch.zeros(clients, 3, dtype=torch.int64),
        "rounds_M": torch.zeros(clients, dtype=torch.int64),
        "own_M": torch.zeros(clients, dtype=torch.bool),
    }


def upload(
    partition: int, entries: list[tuple[int, tuple[float, float], int]], number: int = 1, w: float = 0.0
) -> Upload:
    ids, vectors, counts = zip(*entries, strict=True) if entries else ((), (), ())
    prototypes = PrototypeSet(torch.tensor(ids), torch.tensor(vectors), torch.tensor(counts)) if entries else None
    model = {"w": torch.tensor([w]), "steps": torch.tensor(10 * partition)}
    return Upload(partition, number, prototypes, model, examples=100)


def absorb(found: Any, state: State, *uploads: Upload) -> tuple[State, dict[str, float]]:
    for each in uploads:
        found.inspect(state, each)
    return found.absorb(state, uploads, torch.Generator(), torch.device("cpu"))  # type: ignore[no-any-return]


def test_prototypes_and_models_are_those_of_the_worked_example() -> None:
    uploads = [upload(i, entries, w=float(2**i)) for i, entries in TABLE.items()]
    new, metrics = absorb(strategy(DCCFSSL), empty(), *uploads)
    expected = torch.tensor([[0.833333, 0.333333], [0.5, 1.0], [0.2, 0.8]])
    assert torch.allclose(new["protos_CK"], expected, atol=1e-6)
    assert new["known_C"].all()
    # A = 14, 8, 8 for the models 1, 2, 4.
    assert new["model/w"].item() == pytest.approx((14 * 1 + 8 * 2 + 8 * 4) / 30)
    assert int(new["model/steps"]) == 0  # that of client 0, which weighs most
    assert metrics["authentic_labelled"] == 14
    assert metrics["authentic_unlabelled"] == 8
    assert metrics["labelled_weight"] == pytest.approx(14 / 30)
    assert (metrics["prototypes"], metrics["prototype_age"]) == (3, 0)
    expanded, _ = absorb(strategy(DCCFSSL, expand_models=True), empty(), *uploads)
    assert expanded["model/w"].item() == pytest.approx((28 * 1 + 8 * 2 + 8 * 4) / 44)
    plain, metrics = absorb(strategy(DCCFSSL, authenticate=False), empty(), *uploads)
    assert torch.allclose(plain["protos_CK"], torch.tensor([[0.75, 0.5], [0.5, 1.0], [1 / 3, 2 / 3]]), atol=1e-6)
    assert plain["model/w"].item() == pytest.approx(7 / 3)  # all have 100 samples
    assert metrics["labelled_weight"] == pytest.approx(1 / 3)


def test_a_round_replaces_the_entries_of_its_clients_and_leaves_the_others() -> None:
    found = strategy(DCCFSSL)
    first, _ = absorb(found, empty(), *(upload(i, entries) for i, entries in TABLE.items()))
    second, metrics = absorb(found, first, upload(1, [(1, (0.0, 2.0), 7)], number=2))
    expected = torch.tensor([[1.0, 0.2], [-0.125, 1.875], [0.2, 0.8]])
    assert torch.allclose(second["protos_CK"], expected, atol=1e-6)
    for name in ("store_MCK", "counts_MC", "rounds_M"):
        assert torch.equal(second[name][[0, 2]], first[name][[0, 2]]), name
    assert second["rounds_M"].tolist() == [1, 2, 1]
    assert metrics["prototype_age"] == pytest.approx(2 / 3)
    # Prototypes of this round alone: class 0 and 2 keep what they had.
    alone, _ = absorb(strategy(DCCFSSL, max_age=0), first, upload(1, [(1, (0.0, 2.0), 7)], number=2))
    assert torch.equal(alone["protos_CK"][[0, 2]], first["protos_CK"][[0, 2]])
    assert alone["protos_CK"][1].tolist() == [0, 2]


def test_n_and_m_count_the_clients_that_were_there_by_their_roles() -> None:
    found = strategy(DCCFSSL, labelled=2, clients=4)
    entries = [(0, (1.0, 0.0), 2)], [(0, (0.0, 1.0), 2)], [(0, (0.0, 0.0), 4)]
    first, _ = absorb(found, empty(4), *(upload(i, each) for i, each in enumerate(entries)))
    assert torch.allclose(first["protos_CK"][0], torch.tensor([0.25, 0.25]))  # m / n = 2 / 2
    # Client 1 is not there when the run goes on: what it sent still counts as that of a client with labels.
    del found.run.roster.reports[1]
    found.run.roster.total = 4
    second, _ = absorb(found, first, upload(0, entries[0], number=2))
    assert second["own_M"].tolist() == [True, True, False, False]
    assert torch.equal(second["protos_CK"], first["protos_CK"])
    # Who never was there counts for nothing: n = 1 and m = 2, so that client 0 weighs 4 against 4.
    never, _ = absorb(found, empty(4), upload(0, entries[0]), upload(2, entries[2]))
    assert torch.allclose(never["protos_CK"][0], torch.tensor([0.5, 0.0]))
    earlier = {name: tensor for name, tensor in first.items() if name != "own_M"}  # a checkpoint of earlier versions
    assert "own_M" in absorb(found, earlier, upload(0, entries[0], number=2))[0]


def test_a_client_that_is_sure_of_nothing_any_more_loses_its_entry() -> None:
    found = strategy(DCCFSSL)
    first, _ = absorb(found, empty(), *(upload(i, entries) for i, entries in TABLE.items()))
    second, _ = absorb(found, first, upload(2, [], number=2))
    assert int(second["counts_MC"][2].sum()) == 0
    assert torch.allclose(second["protos_CK"][1], torch.tensor([1.0, 1.0]))  # client 1 alone
    # Where nobody has any left, the last prototypes stay.
    third, metrics = absorb(found, second, *(upload(i, [], number=3) for i in (0, 1)))
    assert torch.equal(third["protos_CK"], second["protos_CK"])
    assert third["known_C"].all()
    assert metrics["authentic_labelled"] == 0


def test_nobody_authentic_means_the_labelled_alone_or_no_change_at_all() -> None:
    found = strategy(DCCFSSL, labelled=2, clients=3)
    three = [upload(i, [], w=float(2**i)) for i in range(3)]
    three[1] = Upload(1, 1, weights=three[1].weights, examples=300)
    new, metrics = absorb(found, empty(), *three)
    assert new["model/w"].item() == pytest.approx((100 * 1 + 300 * 2) / 400)
    assert metrics["labelled_weight"] == 1
    state = empty()
    kept, metrics = absorb(found, state, three[2])
    assert torch.equal(kept["model/w"], state["model/w"])
    assert metrics["labelled_weight"] == 0
    assert not kept["known_C"].any()


def test_with_labels_everywhere_and_all_right_it_is_fedavg() -> None:
    uploads = [upload(i, [(0, (1.0, 0.0), 60), (1, (0.0, 1.0), 40)], w=float(2**i)) for i in range(3)]
    found = strategy(DCCFSSL, labelled=3)
    new, _ = absorb(found, empty(), *uploads)
    plain, _ = absorb(
        strategy(FedAvg, labelled=3), {"model/w": torch.zeros(1), "model/steps": torch.tensor(0)}, *uploads
    )
    assert torch.equal(new["model/w"], plain["model/w"])
    assert torch.allclose(new["protos_CK"][:2], torch.eye(2))


def test_impossible_uploads_are_refused_by_name() -> None:
    found, state, good = strategy(DCCFSSL), empty(), upload(2, TABLE[2])
    assert good.prototypes is not None
    uncounted = PrototypeSet(good.prototypes.class_ids, good.prototypes.vectors)
    for words, bad in (
        ("client 2 sent prototypes without counts", Upload(2, 1, uncounted, good.weights, 100)),
        ("client 2 sent counts of 8 samples: at most 7", Upload(2, 1, good.prototypes, good.weights, 7)),
        ("client 2 sent counts of 8 samples: at most 0", Upload(2, 1, good.prototypes)),
        ("client 2 sent num-examples=None", Upload(2, 1, good.prototypes, good.weights)),
        ("client 2 sent other weights", Upload(2, 1, None, {"w": torch.zeros(1)}, 100)),
    ):
        with pytest.raises(ValueError, match=words):
            found.inspect(state, bad)


def test_model_prototypes_and_counts_survive_the_wire_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(100)[torch.arange(100) != 7]
    vectors = torch.randn(99, 128, generator=generator)
    counts = torch.randint(1, 1000, (99,), generator=generator)
    model = {"w": torch.randn(5, generator=generator), "steps": torch.tensor(3)}
    sent = Upload(4, 2, PrototypeSet(ids, vectors, counts), model, 50000, {"loss": 0.5})
    back = decode_upload(encode_upload(sent), Expected(4, 2, 100, 128))
    assert back.prototypes is not None
    assert back.prototypes.counts is not None
    assert torch.equal(back.prototypes.counts, counts)
    assert int(back.prototypes.counts.sum()) == int(counts.sum())
    down = decode_download(encode_download(Download(PrototypeSet(ids, vectors), model, 2, "x")), 100, 128)
    for found in (back, down):
        assert found.prototypes is not None
        assert torch.equal(found.prototypes.vectors, vectors)
        known = found.prototypes.dense(100)[1]
        assert known.tolist() == [number != 7 for number in range(100)]
        assert found.weights is not None
        assert all(torch.equal(found.weights[name], model[name]) for name in model)


SURE = "algorithm.client.threshold=0.26"


def test_without_contrast_and_authentication_it_is_fedavg_with_fixmatch(tmp_path: Path) -> None:
    plain = f"{SURE} federation.rounds=2"
    run(tmp_path / "fixmatch", "fedavg_fixmatch", plain)
    run(tmp_path / "dccfssl", "dccfssl_no_dcc", f"{plain} algorithm.server.authenticate=false")
    assert same(model_of(tmp_path / "fixmatch"), model_of(tmp_path / "dccfssl"))
    assert rows_of(tmp_path / "fixmatch")[0]["metrics"]["train_confident"] > 0.5


def test_where_nothing_is_confident_the_labelled_clients_make_the_model(tmp_path: Path) -> None:
    # Two of four clients have labels and two of four train: some rounds have both, one or none of them.
    never = "labels.count=2 algorithm.client.threshold=1.1 federation.participation=0.5 federation.rounds=6 seed=5"
    grid = run(tmp_path / "run", "dccfssl", never)
    sent = {(number, partition): tensors(message) for number, partition, message in messages(grid, "train", sent=True)}
    models = {number: model for (number, _), model in sent.items()} | {7: model_of(tmp_path / "run")}
    kinds = set()
    for number in range(1, 7):
        replies = {partition: reply for round_, partition, reply in messages(grid, "train") if round_ == number}
        own = [reply for partition, reply in replies.items() if partition < 2]
        kinds.add(len(own))
        assert all(not contents.has_prototypes(reply) for partition, reply in replies.items() if partition >= 2)
        counts = [float(tensors(reply, "prototypes")["counts"].sum()) for reply in own]
        if not own:
            assert same(models[number + 1], models[number])
        for name, tensor in models[number + 1].items():
            if own and tensor.is_floating_point():
                parts = [count * tensors(reply)[name].double() for count, reply in zip(counts, own, strict=True)]
                assert torch.allclose(tensor.double(), sum(parts, torch.zeros(())) / sum(counts), atol=1e-6), name
    assert kinds == {0, 1, 2}


def test_the_first_round_has_no_prototypes_and_the_second_has(tmp_path: Path) -> None:
    grid = run(tmp_path / "run", "dccfssl", "train.local_epochs=6")
    sent = [(number, message) for number, _, message in messages(grid, "train", sent=True)]
    assert all(contents.has_prototypes(message) == (number == 2) for number, message in sent)
    one, two = (row["metrics"] for row in rows_of(tmp_path / "run"))
    assert "train_gcc_loss" not in one
    assert one["prototypes"] >= 2
    assert two["train_gcc_loss"] > 0
    grid = run(tmp_path / "without", "dccfssl_no_gcc")
    assert not any(contents.has_prototypes(message) for _, _, message in messages(grid, "train", sent=True))


def test_labels_everywhere(tmp_path: Path) -> None:
    run(tmp_path / "run", "dccfssl", "labels=all")
    metrics = rows_of(tmp_path / "run")[-1]["metrics"]
    assert metrics["labelled_weight"] == 1
    assert "authentic_unlabelled" not in metrics
    assert state_of(tmp_path / "run")["protos_CK"].isfinite().all()


@pytest.mark.parametrize("record", ["weights", "prototypes"])
def test_a_client_with_nan_is_left_out_and_keeps_its_entry(record: str, tmp_path: Path) -> None:
    seen: dict[int, Tensor] = {}

    def spoil(reply: Message, partition: int, number: int) -> Message:
        if partition == 1 and reply.metadata.message_type == "train":
            seen[number] = tensors(reply, "prototypes")["vectors"]
            if number == 2:
                name = "head.bias" if record == "weights" else "vectors"
                values = tensors(reply, record)[name].numpy()
                values[0] = np.nan
                if record == "weights":
                    reply.content[record][name] = Array(values)
                else:
                    contents.put_vectors(reply, values)
        return reply

    run(tmp_path / "run", "dccfssl", SURE, spoil=spoil)
    rows, state = rows_of(tmp_path / "run"), state_of(tmp_path / "run")
    assert [failure["partition"] for failure in rows[1]["failures"]] == [1]
    assert "finite" in rows[1]["failures"][0]["reason"]
    assert state["rounds_M"].tolist() == [2, 1, 2, 2]
    held = state["store_MCK"][1][state["counts_MC"][1] > 0]
    assert torch.equal(held, seen[1])
    assert all(tensor.isfinite().all() for tensor in state.values())
