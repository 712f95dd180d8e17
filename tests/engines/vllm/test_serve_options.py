"""Options of ``kvmosaic serve`` beside those of ``vllm serve``, which have to reach vLLM."""

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvmosaic.core.setting import all_settings


def test_no_setting_takes_an_option_from_vllm():
    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    theirs = parser._option_string_actions
    assert "--max-model-len" in theirs
    for setting in all_settings():
        assert not set(setting.flag.split("/")) & set(theirs), setting.flag
