# The one list of public names; __init__.py reads it and imports each name on first use.
from jsparse.cache import KVCache as KVCache
from jsparse.cached_prompt import CachedPrompt as CachedPrompt
from jsparse.conversation import Conversation as Conversation
from jsparse.engine.async_engine import AsyncEngine as AsyncEngine
from jsparse.engine.errors import EngineError as EngineError
from jsparse.engine.errors import EngineFull as EngineFull
from jsparse.engine.llm import LLM as LLM
from jsparse.engine.outputs import RequestOutput as RequestOutput
from jsparse.evaluation.channel_calibration import calibrate_channels as calibrate_channels
from jsparse.evaluation.comparison.compare import compare as compare
from jsparse.evaluation.comparison.result import PolicyComparison as PolicyComparison
from jsparse.evaluation.head_calibration import calibrate_heads as calibrate_heads
from jsparse.generation import generate as generate
from jsparse.models.checkpoint import Params as Params
from jsparse.models.checkpoint import load as load
from jsparse.models.checkpoint import save as save
from jsparse.models.transformers_models import from_transformers as from_transformers
from jsparse.policies.expressions import as_policy as parse_policy  # noqa: F401  another name
from jsparse.policy import Policy as Policy
from jsparse.runtime.collecting import CompletionOutput as CompletionOutput
from jsparse.runtime.collecting import Logprob as Logprob
from jsparse.runtime.functional import Batch as Batch
from jsparse.runtime.functional import decode_step as decode_step
from jsparse.runtime.functional import init_batch as init_batch
from jsparse.runtime.functional import prefill as prefill
from jsparse.runtime.host_reader import Generation as Generation
from jsparse.runtime.host_reader import GenerationStats as GenerationStats
from jsparse.runtime.sampling_params import SamplingParams as SamplingParams
from jsparse.runtime.scoring import logits as logits
from jsparse.runtime.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
from jsparse.selection import Selection as Selection
from jsparse.text.reasoning import split_reasoning as split_reasoning
from jsparse.text.tool_calls import split_tool_calls as split_tool_calls

# isort: split
# policies: written by .ci/policy_tables.py
from jsparse.builder import dense as dense
from jsparse.policies.ada_kv import ada_kv as ada_kv
from jsparse.policies.all_pages import all_pages as all_pages
from jsparse.policies.arkvale import arkvale as arkvale
from jsparse.policies.auto import auto as auto
from jsparse.policies.cluster_kv import cluster_kv as cluster_kv
from jsparse.policies.combinators import dense_layers as dense_layers
from jsparse.policies.combinators import keep as keep
from jsparse.policies.combinators import retrieval_heads as retrieval_heads
from jsparse.policies.double_sparsity import double_sparsity as double_sparsity
from jsparse.policies.duo_attention import duo_attention as duo_attention
from jsparse.policies.expected_attention import expected_attention as expected_attention
from jsparse.policies.h2o import h2o as h2o
from jsparse.policies.hard_kv import hard_kv as hard_kv
from jsparse.policies.kvzip import kvzip as kvzip
from jsparse.policies.lfps import lfps as lfps
from jsparse.policies.lychee_cluster import lychee_cluster as lychee_cluster
from jsparse.policies.lychee_decode import lychee_decode as lychee_decode
from jsparse.policies.magic_pig import magic_pig as magic_pig
from jsparse.policies.offloaded import offloaded as offloaded
from jsparse.policies.oracle import oracle_top_k as oracle_top_k
from jsparse.policies.oracle import oracle_top_p as oracle_top_p
from jsparse.policies.quest import quest as quest
from jsparse.policies.quest_chunks import quest_chunks as quest_chunks
from jsparse.policies.r_kv import r_kv as r_kv
from jsparse.policies.raas import raas as raas
from jsparse.policies.razor_attention import razor_attention as razor_attention
from jsparse.policies.seer_attention import seer_attention as seer_attention
from jsparse.policies.shadow_kv import shadow_kv as shadow_kv
from jsparse.policies.snapkv import snapkv as snapkv
from jsparse.policies.sparse_prefill import sparse_prefill as sparse_prefill
from jsparse.policies.streaming import streaming as streaming
from jsparse.policies.tidal import tidal as tidal
from jsparse.policies.twilight import twilight as twilight
from jsparse.policies.verified import verified as verified

# end of policies

__version__: str
__all__: list[str]
