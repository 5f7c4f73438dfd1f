"""All tests under one roof: `from mvllm.testing.suite.everything import *` in a test file of one's own."""

from mvllm.testing.suite.test_att_attention import *  # noqa: F403
from mvllm.testing.suite.test_cfg_configuration import *  # noqa: F403
from mvllm.testing.suite.test_com_communication import *  # noqa: F403
from mvllm.testing.suite.test_dev_device import *  # noqa: F403
from mvllm.testing.suite.test_e2e_engine import *  # noqa: F403
from mvllm.testing.suite.test_grf_graphs import *  # noqa: F403
from mvllm.testing.suite.test_kvl_layout import *  # noqa: F403
from mvllm.testing.suite.test_lif_lifecycle import *  # noqa: F403
from mvllm.testing.suite.test_ops_operations import *  # noqa: F403
from mvllm.testing.suite.test_plg_plugin import *  # noqa: F403
from mvllm.testing.suite.test_prb_probe import *  # noqa: F403
from mvllm.testing.suite.test_run_model import *  # noqa: F403
from mvllm.testing.suite.test_shp_shapes import *  # noqa: F403
from mvllm.testing.suite.test_smp_sampling import *  # noqa: F403
