"""`observer=[mlflow]`: a run of an MLflow experiment, in a database of its own or on a server."""

from __future__ import annotations

from urllib.parse import urlsplit

from dtf.api.registry import option, register
from dtf.core.errors import ConfigError
from dtf.observers.tracker import Tracker


@register("observer", "mlflow")
class Mlflow(Tracker):
    """Keep the run in MLflow: metrics `<split>/<metric>` by step, the config as parameters, warnings as description,
    the best value and how it ended. Trials of a sweep are children of one run.
    """

    tracking_uri: str = option(
        default="",
        doc="sqlite:///FILE, https://HOST, or what else MLflow takes; empty: MLFLOW_TRACKING_URI, else "
        "sqlite:///mlflow.db, a file in the current directory",
    )
    experiment: str = option(default="", doc="empty: MLFLOW_EXPERIMENT_NAME, else the recipe's name")

    package = "mlflow"
    requirement = "mlflow>=3"

    def check(self) -> None:
        super().check()
        try:
            secret = urlsplit(self.tracking_uri).password
        except ValueError as error:
            raise ConfigError(f"observer.mlflow.tracking_uri={self.tracking_uri} is no address: {error}") from error
        if secret:
            raise ConfigError(
                "observer.mlflow.tracking_uri holds a password, which config.yaml would show; put the address into the "
                "variable MLFLOW_TRACKING_URI, or user and password into MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD"
            )
