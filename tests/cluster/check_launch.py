"""`make check-launch`: the files under launch/ and docker/ against the tools that will read them.

Kubernetes' schemas come with the package kubernetes-validate (100 MB), which gets a virtual environment of its own in the cache folder.
They do not know LeaderWorkerSet: the template of its pods is checked as a Deployment's. docker-compose and Slurm's sbatch are asked where
they are installed (sbatch needs a controller that runs); the summary says what was not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import yaml

from mstar.native import cache_folder

ROOT = Path(__file__).resolve().parents[2]


def kubernetes() -> str:
    """Every document of launch/kubernetes.yaml, strictly."""
    place = cache_folder() / "tools" / "kubernetes-validate"
    command = place / "bin" / "kubernetes-validate"
    if not command.exists():
        sys.stderr.write(f"installing kubernetes-validate into {place}\n")
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([place / "bin" / "pip", "install", "-q", "kubernetes-validate"], check=True)
    documents = [_known(document) for document in yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text(encoding="utf-8"))]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(documents, file)
        file.flush()
        subprocess.run([command, "--strict", file.name], check=True)
    return f"kubernetes: {len(documents)} documents are valid"


def _known(document: dict) -> dict:
    if document["kind"] != "LeaderWorkerSet":
        return document
    spec = document["spec"]["leaderWorkerTemplate"]
    template = spec["workerTemplate"]
    selector = {"matchLabels": template["metadata"]["labels"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": document["metadata"],
        "spec": {"selector": selector, "template": template},
    }


def compose() -> str:
    """docker/compose.yaml as docker-compose reads it."""
    if shutil.which("docker-compose") is None:
        return "compose: docker-compose is not installed, NOT CHECKED"
    environment = {**os.environ, "MODEL": "/model", "ADAPTERS": "/adapters"}
    command = ["docker-compose", "-f", str(ROOT / "docker/compose.yaml"), "config", "-q"]
    subprocess.run(command, check=True, env=environment)
    return "compose: docker-compose takes it"


def slurm() -> str:
    """launch/slurm.sbatch: its syntax, and what a controller says of it."""
    script = str(ROOT / "launch/slurm.sbatch")
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("sbatch") is None or subprocess.run(["scontrol", "ping"], capture_output=True).returncode:
        return "slurm: bash takes it; no controller runs here, sbatch NOT ASKED"
    subprocess.run(
        ["sbatch", "--test-only", "--nodes=1", "--gpus-per-node=2", "--cpus-per-task=1", script, "serve.yaml", "keys"], check=True
    )
    return "slurm: sbatch takes it"


def main() -> int:
    """All of them."""
    done = [kubernetes(), compose(), slurm()]
    sys.stdout.write("\n".join(done) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
