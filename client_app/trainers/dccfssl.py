"""Client half of DCCFSSL: the basic loss and two contrastive ones; uploads model and prototypes."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from client_app.loop import Step, fit_epochs
from client_app.session import Session
from client_app.trainers.global_model import Beliefs, GlobalModelTrainer, supervised_loss
from task.messages import PrototypeSet, Upload
from task.methods.dccfssl import GccViews, LccUnlabelled, dual_contrast, prototype_samples, representations
from task.methods.fixmatch import Targets, pseudo_labels, true_labels, unlabelled_loss
from task.prototypes import means_over
from task.schema import require


@dataclass
class DCCFSSLTrainer(GlobalModelTrainer):
    """Local objective ``L_b + lambda_lcc L_lcc + lambda_gcc L_gcc``, with and without labels.

    Parameters
    ----------
    lambda_lcc, lambda_gcc : float
        Weights of the local and of the global class-aware contrastive loss. With both 0 no views are made for them.
    temperature : float
        T of both.
    threshold : float
        tau, from which confidence on a pseudo-label is trusted.
    lcc_unlabelled, gcc_views
        Readings of the two losses, see ``task/methods/dccfssl.py``.
    normalise : bool
        Whether prototypes are means of features of length 1, or of the features as they are.
    authenticate : bool
        As on the server: False makes prototypes of all samples (-ARA).
    authentication_view : str
        What the trained model sees of the samples it authenticates: ``plain`` or a ``weak`` view.
    teacher : str
        Who gives pseudo-labels: the ``local`` model that is being trained, or the ``global`` one as it came.
    """

    lambda_lcc: float = 1.0
    lambda_gcc: float = 1.0
    temperature: float = 0.07
    threshold: float = 0.95
    lcc_unlabelled: LccUnlabelled = "ccssl_push"
    gcc_views: GccViews = "strong"
    normalise: bool = True
    authenticate: bool = True
    authentication_view: Literal["plain", "weak"] = "plain"
    teacher: Literal["local", "global"] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lambda_lcc", "lambda_gcc", "threshold"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), name, value, "a finite number of at least 0")
        require(0 < self.temperature < float("inf"), "temperature", self.temperature, "a finite number above 0")

    def fit(self, session: Session) -> Upload:
        """Train the global model, then return it with the prototypes of the samples that are authentic."""
        self.take_up(session)
        beliefs = Beliefs()
        metrics = fit_epochs(session, self._step(session, beliefs), raw=True)
        metrics |= beliefs.metrics(session.truth()) if not session.is_labelled else {}
        return self.upload(session, metrics, self._prototypes(session))

    def _step(self, session: Session, beliefs: Beliefs) -> Step:
        model, views, regularised = session.model, self.view_maker(session), self.proximal_regulariser(session)
        kinds = "weak" if session.is_labelled else "weak+strong"
        kinds = "all" if self.lambda_lcc or self.lambda_gcc else kinds
        teach, contrast = self._teacher(session), self._contrast(session)

        def step(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            seen = views(images, kinds)
            feats_NK = model.features(seen)
            logits_VBC = model.head(feats_NK).float().view(-1, len(images), session.num_classes)
            if session.is_labelled:
                targets, losses = true_labels(labels), {"loss": supervised_loss(logits_VBC[0], labels)}
            else:
                targets = teach(seen[: len(images)], logits_VBC[0])
                beliefs.note(targets)
                # A constant where nothing is trusted, so that such a batch moves nothing (client_app/loop.py).
                trusted = bool(targets.trusted_B.any())
                loss = unlabelled_loss(logits_VBC[1], targets) if trusted else logits_VBC.new_zeros(())
                losses = {"unlabelled_loss": loss}
            return regularised(losses | contrast(feats_NK.float(), targets))

        return step

    def _teacher(self, session: Session) -> Callable[[Tensor, Tensor], Targets]:
        """Return what gives the pseudo-labels of weak views, of which the model's own logits are known."""
        if self.teacher == "local" or session.is_labelled:
            return lambda weak, own_BC: pseudo_labels(own_BC, self.threshold)
        frozen = copy.deepcopy(session.model).eval()

        def teach(weak: Tensor, own_BC: Tensor) -> Targets:
            with torch.no_grad():
                return pseudo_labels(frozen(weak).float(), self.threshold)

        return teach

    def _contrast(self, session: Session) -> Callable[[Tensor, Targets], dict[str, Tensor]]:
        """Return what gives the two contrastive terms of the features of three views, as far as they can teach."""
        received = session.download.prototypes
        dense = received.dense(session.num_classes) if received is not None else (None, None)
        protos_CK, known_C = (None if tensor is None else tensor.to(session.device) for tensor in dense)

        def contrast(feats_NK: Tensor, targets: Targets) -> dict[str, Tensor]:
            if not (self.lambda_lcc or self.lambda_gcc):
                return {}
            trusted = session.is_labelled or bool(targets.trusted_B.any())
            return dual_contrast(
                representations(feats_NK).view(3, len(targets.labels_B), -1),
                *targets,
                protos_CK if trusted else None,
                known_C,
                lambda_lcc=self.lambda_lcc if trusted or self.lcc_unlabelled != "drop" else 0.0,
                lambda_gcc=self.lambda_gcc,
                temperature=self.temperature,
                lcc_unlabelled=self.lcc_unlabelled,
                gcc_views=self.gcc_views,
            )

        return contrast

    @torch.no_grad()
    def _prototypes(self, session: Session) -> PrototypeSet | None:
        """Return o^i and v^i of the trained model."""
        model, views, weak = session.model, self.view_maker(session), self.authentication_view == "weak"
        model.eval()

        def samples() -> Iterator[tuple[Tensor, Tensor]]:
            for images, labels in session.all_train_batches(raw=weak):
                feats_BK = model.features(views(images, "weak") if weak else images).float()
                yield prototype_samples(
                    feats_BK,
                    model.head(feats_BK).float(),
                    labels if session.is_labelled else None,
                    threshold=self.threshold,
                    authenticate=self.authenticate,
                    normalise=self.normalise,
                )

        means_CK, counts_C = means_over(samples(), session.num_classes, session.config.model.feature_dim)
        return PrototypeSet.of(means_CK, counts_C, share_counts=True)
