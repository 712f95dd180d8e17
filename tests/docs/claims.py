"""How each command of the documentation is tested."""

import re
from dataclasses import dataclass

from tests.docs.blocks import all_commands

HERE = "run by tests/docs/test_blocks.py"
ENGINE = "run by tests/engines/vllm/test_documented_commands.py"
EXAMPLES = "run by tests/engines/vllm/test_examples.py"
DOCTOR = "run with other models by tests/engines/vllm/test_doctor.py"
CHECKED = "checked, but not run"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """What happens to commands that match ``pattern`` from their beginning on, and why, if they are not run."""

    pattern: str
    how: str
    why: str = ""


_VARIABLES = r"(\w+=\w+ )*"
CLAIMS = (
    Claim(rf"{_VARIABLES}(\.venv-vllm/bin/)?kvmosaic serve|vllm serve|curl|kvmosaic store warm", ENGINE),
    Claim(r"export KVMOSAIC_DISK_PATH=", ENGINE),
    Claim(r"python examples/", EXAMPLES),
    Claim(r"kvmosaic (eval|calibrate|tune) ", HERE),
    Claim(r"kvmosaic doctor ", DOCTOR, "that file tests each option"),
    Claim(r"export KVMOSAIC_(CHUNK_SEPARATOR|CHUNK_ADMIN_KEY|STORE_KEY)=", HERE),
    Claim(rf"{_VARIABLES}make ", CHECKED, "it runs for minutes and more; make accepts the command"),
    Claim(rf"{_VARIABLES}\.venv[-\w]*/bin/python -m pytest", CHECKED, "tests in tests; their files exist"),
    Claim(r"python3 -m venv \.venv && \.venv/bin/pip install 'torch", NOT_RUN, "it fetches torch from its own index"),
    Claim(r"pip install -e '\.\[vllm\]'", NOT_RUN, "it needs a GPU"),
    Claim(r"python -m tests.ascend_report", NOT_RUN, "it needs an NPU; ascend/test_report.py runs its parts"),
    Claim(r"mooncake_", NOT_RUN, "it needs several machines; tests/store/remote_servers.py starts both on one"),
    Claim(r"(MODEL=\S+ )?docker|kubectl", NOT_RUN, "it needs Docker or a cluster; tests/test_deploy.py checks files"),
)


def claims_about(command: str) -> list[Claim]:
    """The claims that match this command."""
    return [claim for claim in CLAIMS if re.match(claim.pattern, command)]


def commands(how: str) -> list[str]:
    """The documented commands that are tested in this way."""
    return [command for command in all_commands() if any(claim.how == how for claim in claims_about(command))]
