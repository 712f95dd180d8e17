"""``--vllm-options`` of ``kvmosaic store warm``."""

import pytest

from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.warm import parse_options


@pytest.mark.parametrize("options", ["--no-such-option", "--max-model-len many", "--quantization 'x"])
def test_options_that_vllm_does_not_know_are_one_line(options):
    with pytest.raises(ConfigError, match=r"^--vllm-options: .*$"):
        parse_options(options)


def test_options_as_vllm_serve_takes_them():
    assert parse_options("--max-model-len 2k --tensor-parallel-size=2") == {
        "max_model_len": 2000,
        "tensor_parallel_size": 2,
    }
