from pathlib import Path

import pytest

from client_app.node_facts import node_facts
from task.config import CONF_DIR, build, load, to_yaml
from task.paths import require_absolute_paths
from task.resume import check_unchanged
from tests.algorithms import fitting

# Not experiment and sweep: see test_experiments.py.
GROUPS = {
    path.name: sorted(file.stem for file in path.glob("*.yaml"))
    for path in sorted(CONF_DIR.iterdir())
    if path.is_dir() and path.name not in ("experiment", "sweep")
}
# Groups that must be completed by the user: a path to own data.
NEED_A_PATH = {"npz": "data.source.path=/x.npz", "pfllib": "data.source.root=/x"}
NEED_A_PATH |= {"image_folder": "data.source.root=/x"}


@pytest.mark.parametrize(("group", "option"), [(group, name) for group, names in GROUPS.items() for name in names])
def test_every_file_composes(group: str, option: str) -> None:
    more = f" {NEED_A_PATH[option]}" if group == "data" and option in NEED_A_PATH else ""
    needed = {"algorithm": fitting, "labels": lambda name: f"{fitting('fedavg_fixmatch')} labels={name}"}
    config = load(needed[group](option) if group in needed else f"{group}={option}{more}")
    if group in ("algorithm", "data", "model"):
        assert getattr(config, group).name == option
    assert "_target_" in to_yaml(config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("algoritm=fedproto", ["algoritm", "algorithm"]),
        ("algorithm=fedprot", ["fedprot", "fedproto"]),
        ("train.lrr=0.1", ["train.lrr", "train.lr"]),
        ("federation.num_client=3", ["federation.num_client", "federation.num_clients"]),
        ("algorithm.client.wieght=1", ["algorithm.client.wieght", "algorithm.client.weight"]),
        ("+algorithm.client.extra=1", ["algorithm.client.extra"]),
        ("+extra=1", ["extra"]),
        ("train.lr=fast", ["train.lr", "fast"]),
        ("train.lr=-1", ["train.lr", "above 0"]),
        ("train.batch_size=0", ["train.batch_size", "at least 1"]),
        ("train.batch_size=1.5", ["train.batch_size", "1.5"]),
        ("federation.rounds=0", ["federation.rounds", "at least 1"]),
        ("federation.participation=1.5", ["federation.participation", "at most 1"]),
        ("federation.on_failure=ignore", ["federation.on_failure", "tolerate, stop"]),
        ("train.device=tpu", ["train.device", "auto, cpu, cuda"]),
        ("train.precision=int8", ["train.precision", "fp32"]),
        ("seed=-1", ["seed"]),
        ("seed=null", ["seed"]),
        ("name=a/b", ["name"]),
        ("algorithm.inference=vote", ["algorithm.inference", "head, prototype"]),
        ("algorithm.server.margin=wide", ["algorithm.server.margin", "max_pair"]),
        ("algorithm.server.margin_cap=-1", ["algorithm.server.margin_cap", "at least 0"]),
        ("algorithm.server.epochs=true", ["algorithm.server.epochs", "whole number"]),
        ("algorithm.client.weight=-0.1", ["algorithm.client.weight", "at least 0"]),
        ("algorithm.server._target_=os.system", ["algorithm.server._target_", "task"]),
        ("algorithm.server._target_=task.config.importlib", ["_target_"]),
        ("algorithm.client._target_=client_app.trainers.base.Missing", ["cannot be imported"]),
        ("partition.alpha=0", ["partition", "alpha"]),
        ("model.feature_dim=0", ["model.feature_dim"]),
        ("model.entries=[]", ["model.entries"]),
        ("model.entries.0.width=wide", ["model.entries", "width", "wide"]),
        ("+model.pretrained.nobody=/x", ["model.pretrained", "nobody"]),
        ("resume=/x federation.state=context", ["resume", "federation.state=disk"]),
        ("train.lr", ["train.lr"]),
        ("resume=''", ["resume", "folder of an earlier run"]),
        ("debug=smok", ["debug=smok", "smoke"]),
        ("+debug=smok", ["debug=smok", "smoke"]),
        ("experiment=cifar100", ["experiment=cifar100", "cifar100_tau_1"]),
        ("sweep=table1", ["sweep=table1", "protofed"]),
        ("+sweep=tau", ["sweep=tau", "protofed"]),
        ("experiment=cifar100_tau_1 algorithm=local", ["algorithm.server.margin_cap"]),
        ("experiment=cifar100_tau_1 experiment.name=a/b", ["experiment.name", "a/b"]),
        ("experiment=cifar100_tau_1 experiment.accuracy.fedtgp=[1]", ["experiment.accuracy.fedtgp", "[mean, std"]),
        ("experiment=cifar100_tau_1 experiment.accuracy.fedtgp=[101,0]", ["experiment.accuracy.fedtgp", "percent"]),
        ("experiment=cifar100_tau_1 experiment.accuracy.fedtgp=[null,1]", ["experiment.accuracy.fedtgp", "percent"]),
        ("experiment=cifar100_practical experiment.communication.fml=-1", ["experiment.communication.fml"]),
        ("data.stand_in=maybe", ["data.stand_in", "maybe"]),
        ("partition.max_samples=10 federation.num_clients=20", ["partition.max_samples", "federation.num_clients=20"]),
        ("train.clip=0", ["train.clip", "above 0"]),
        ("labels=few", ["labels='few'", "fedtgp needs labels on every client"]),
        ("algorithm=local labels.count=2", ["labels", "local needs labels"]),
        ("algorithm=fedavg model=cnn4 labels=few", ["labels='few'", "fedavg needs labels"]),
        ("labels=few labels.count=0", ["labels.count=0", "at least 1"]),
        ("labels=few labels.share=0", ["labels.share=0", "above 0"]),
        ("labels=few labels.count=5 federation.num_clients=4", ["labels.count=5", "federation.num_clients=4"]),
        ("algorithm=fedavg_fixmatch model=cnn4 labels.warmup_rounds=-1", ["labels.warmup_rounds=-1", "at least 0"]),
        ("labels.warmup_rounds=20 federation.rounds=20", ["labels.warmup_rounds=20", "below federation.rounds=20"]),
        (
            "algorithm=dccfssl_no_ara model=cnn_small partition=iid_train algorithm.server.expand_models=true",
            ["algorithm.server", "expand_models=True", "authenticate=false"],
        ),
        ("labels.warmup_rounds=2", ["labels.warmup_rounds=2", "fedtgp have labels"]),
        ("+algorithm.evaluation=server", ["algorithm.evaluation", "fedtgp has no global model"]),
        ("+algorithm.unlabelled=trained", ["algorithm.unlabelled", "fedtgp needs labels"]),
        ("algorithm=fedavg", ["model='htcnn4'", "one global model"]),
        ("algorithm=fedavg model=res34_htc4", ["model.heads", "one global model"]),
        ("algorithm=fedavg model=cnn4 algorithm.unlabelled=trained", ["algorithm.client.threshold", "labels"]),
        ("algorithm=dccfssl model=cnn4", ["algorithm.evaluation='server'", "pool=all", "partition=iid_train"]),
        ("algorithm=dccfssl model=cnn4 partition=iid_train partition.test_fraction=0.1", ["test_fraction=0.1"]),
        (
            "algorithm=dccfssl model=cnn4 partition=iid_train algorithm.client.authenticate=false",
            ["algorithm.client.authenticate=False", "that of algorithm.server, True"],
        ),
        ("algorithm=dccfssl model=cnn4 algorithm.client.views.flop=1", ["flop", "views.flip"]),
        ("algorithm=dccfssl model=cnn4 algorithm.client.temperature=0", ["temperature", "above 0"]),
        ("algorithm=rscfed model=cnn4 algorithm.server.subsets=0", ["subsets", "at least 1"]),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(overrides: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load(overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_relative_paths_are_refused_by_the_apps() -> None:
    require_absolute_paths(load(["data.cache_dir=/x", "federation.state_dir='~/state'"]))
    for key in ("data.cache_dir", "federation.state_dir", "resume", "+model.pretrained.vgg"):
        with pytest.raises(ValueError, match=f"{key.lstrip('+')}='here' is not allowed: an absolute path"):
            require_absolute_paths(load(f"{key}=here"))


def test_overrides_as_text_or_list_mean_the_same() -> None:
    assert load("algorithm=fedproto train.lr=0.5") == load(["algorithm=fedproto", "train.lr=0.5"])
    assert load("name='two-words'").name == "two-words"


def test_the_debug_group_shrinks_a_run() -> None:
    config = load("debug=smoke")
    assert config.federation.rounds == 2
    assert config.partition["max_samples"] <= 500


def test_groups_that_start_empty_may_be_written_with_a_plus() -> None:
    assert load("+debug=smoke +experiment=cifar100_tau_1") == load("debug=smoke experiment=cifar100_tau_1")


def test_a_paper_s_numbers_do_not_hinder_a_resumed_run(tmp_path: Path) -> None:
    words = "experiment=cifar100_practical"
    (tmp_path / "config.yaml").write_text(to_yaml(load(words)), encoding="utf-8")
    check_unchanged(load(f"{words} experiment.accuracy.fedtgp=[1.0,null] experiment.source=elsewhere"), tmp_path)
    with pytest.raises(ValueError, match=r"data\.name was 'cifar100', is 'cifar100 \(stand-in\)'"):
        check_unchanged(load(f"{words} data.stand_in=true"), tmp_path)


def test_a_run_of_an_earlier_version_goes_on_where_a_later_setting_is_as_it_was(tmp_path: Path) -> None:
    words = "algorithm=fedavg_fixmatch model=cnn4 algorithm.evaluation=clients labels=few"
    path = tmp_path / "config.yaml"
    lines = to_yaml(load(words)).splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "warmup_rounds" not in line), encoding="utf-8")
    assert len(path.read_text("utf-8").splitlines()) == len(lines) - 1
    check_unchanged(load(words), tmp_path)
    with pytest.raises(ValueError, match=r"labels\.warmup_rounds was 0, is 1"):
        check_unchanged(load(f"{words} labels.warmup_rounds=1"), tmp_path)


def test_build_passes_runtime_arguments_and_checks_settings() -> None:
    body = build({"_target_": "task.models.small.plain", "width": 4}, image_shape=(1, 28, 28))
    assert body is not None
    with pytest.raises(ValueError, match=r"unknown setting 'here\.colour'"):
        build({"_target_": "task.models.small.plain", "colour": 4}, "here", image_shape=(1, 28, 28))


GOOD = {"partition-id": 1, "num-partitions": 3}


def test_node_facts() -> None:
    assert node_facts(GOOD).partition == 1
    node = node_facts(GOOD | {"device": "cpu", "state-dir": "/var/state", "cache-dir": "/var/cache"})
    assert (node.device, node.state_dir, node.cache_dir) == ("cpu", Path("/var/state"), Path("/var/cache"))
    assert [node_facts(GOOD | more).role for more in ({}, {"role": "unlabelled"})] == [None, "unlabelled"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["partition-id", "--node-config"]),
        ({"partition-id": 1}, ["num-partitions"]),
        ({"partition-id": "1", "num-partitions": 3}, ["partition-id='1'"]),
        ({"partition-id": 7, "num-partitions": 5}, ["partition-id=7", "0..4"]),
        ({"partition-id": -1, "num-partitions": 5}, ["partition-id=-1"]),
        (GOOD | {"device": "tpu"}, ["device"]),
        (GOOD | {"state-dir": "here"}, ["state-dir", "absolute"]),
        (GOOD | {"state_dir": "/here"}, ["state_dir", "state-dir"]),
        (GOOD | {"role": "teacher"}, ["role='teacher'", "labelled, unlabelled"]),
    ],
)
def test_bad_node_facts_are_refused_by_name(config: dict[str, object], words: list[str]) -> None:  # C32
    with pytest.raises(ValueError, match="node-config") as caught:
        node_facts(config)
    assert all(word in str(caught.value) for word in words)
