"""Flower's ``ClientApp``: one handler for each kind of message. No method is named here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.node_facts import named_errors
from client_app.privacy import protected, random_bytes
from client_app.session import Session, class_names_of, open_session
from client_app.state import open_store
from client_app.trainers.base import Trainer
from task.config import build
from task.messages import UNPLACED, NodeReport
from task.models.split import parameter_count
from task.payload import (
    decode_download,
    decode_placement,
    encode_evaluation,
    encode_node_report,
    encode_upload,
)
from task.seeding import stream_seed

Result = TypeVar("Result")
app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer with the facts of this client; builds its model once, so that a bad one is found before round 1.

    A node that is known by name and has not been told its place yet only says who it is and which classes it knows.
    """
    placement = decode_placement(message.content)
    if placement is None:
        node, known = class_names_of(context)
        if node.partition == UNPLACED:
            own = node.data is not None
            report = NodeReport(UNPLACED, 0, "", 0, 1, known, "", (), name=node.name, own_data=own)
            return Message(encode_node_report(report), reply_to=message)
    session = open_session(context, placement)
    with named_errors(context.node_config):
        parameters = parameter_count(_within_memory(session, lambda: session.model))
    split, labels, classes = session.split, session.dataset.labels, session.num_classes
    shared = session.config.federation.report_sizes
    privacy = session.config.privacy
    held, counts = np.zeros(0, np.int64), None  # a client without labels tells nothing about classes
    if session.is_labelled and not (privacy is not None and privacy.hide_classes):
        held = np.unique(labels[split.train])
        counts = np.bincount(labels[np.concatenate([split.train, split.test])], minlength=classes)
    report = NodeReport(
        partition=session.node.partition,
        num_partitions=session.node.num_partitions,
        model=session.model_name,
        parameters=parameters,
        feature_dim=session.config.model.feature_dim,
        class_names=session.dataset.class_names,
        device=str(session.device),
        class_ids=tuple(int(class_id) for class_id in held),
        train_size=len(split.train) if shared else None,
        test_size=len(split.test) if shared else None,
        class_counts=tuple(int(count) for count in counts) if shared and counts is not None else None,
        image_shape=session.dataset.image_shape,
        role="labelled" if session.is_labelled else "unlabelled",
        name=session.node.name,
        own_data=session.node.data is not None,
    )
    return Message(encode_node_report(report), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Restore the client's model, train it, keep it, and return what the method shares."""
    session, trainer = _open(message, context)
    with _seeded(session):
        upload = _within_memory(session, lambda: trainer.fit(session))
    privacy = session.config.privacy
    if privacy is not None:
        source = random_bytes(privacy, session.node.partition, session.download.round)
        upload = protected(upload, privacy, session.num_classes, trainer.shared_width(session), source)
    content = encode_upload(upload)
    if trainer.keeps_state:
        store = open_store(session.config, session.node, context, session.download.session)
        needed = {session.download.state_round, session.download.durable_round}
        store.save(session.download.round, session.state(trainer.keeps_model), needed)
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the client's model as it is; nothing is kept."""
    session, trainer = _open(message, context)
    privacy = session.config.privacy
    if privacy is not None and not privacy.report_accuracy:
        raise ValueError(f"client {session.node.partition} reports no accuracy: privacy.report_accuracy=false")
    report = _within_memory(session, lambda: trainer.evaluate(session))
    return Message(encode_evaluation(report), reply_to=message)


def _open(message: Message, context: Context) -> tuple[Session, Trainer]:
    session = open_session(context, decode_placement(message.content))
    trainer = build(session.config.algorithm.client, "algorithm.client")
    assert isinstance(trainer, Trainer)
    session.download = decode_download(message.content, session.num_classes, trainer.shared_width(session))
    if session.download.state_round and trainer.keeps_state:
        store = open_store(session.config, session.node, context, session.download.session)
        state = store.load(session.download.state_round)
        _within_memory(session, lambda: session.restore(state, trainer.keeps_model))
    return session, trainer


@contextmanager
def _seeded(session: Session) -> Iterator[None]:
    """Give torch's own generators, from which dropout draws, the stream of this client and round."""
    seed = stream_seed(session.config.seed, "client-torch", session.node.partition, session.download.round)
    devices = [session.device] if session.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer, for GPUs that are not there
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def _within_memory(session: Session, work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns; an exhausted GPU is reported with the client and the settings to lower."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"client {session.node.partition} ({session.model_name}): out of GPU memory; lower train.batch_size or "
            "train.eval_batch_size, or raise federation.gpus_per_client so that fewer clients share the GPU"
        ) from error
