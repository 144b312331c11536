from pagewire.v1 import timing_pb2 as _timing_pb2
from pagewire.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_PHASE_UNSPECIFIED: _ClassVar[WorkerPhase]
    WORKER_PHASE_STARTED: _ClassVar[WorkerPhase]
    WORKER_PHASE_LOADING: _ClassVar[WorkerPhase]
    WORKER_PHASE_LOADED: _ClassVar[WorkerPhase]
    WORKER_PHASE_CACHE_READY: _ClassVar[WorkerPhase]
    WORKER_PHASE_READY: _ClassVar[WorkerPhase]
    WORKER_PHASE_FAILED: _ClassVar[WorkerPhase]

class KvGroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_GROUP_KIND_UNSPECIFIED: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_KEYS_AND_VALUES: _ClassVar[KvGroupKind]

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_NOT_FINITE: _ClassVar[RowStatus]
    ROW_STATUS_DEAD_END: _ClassVar[RowStatus]
    ROW_STATUS_REFUSED: _ClassVar[RowStatus]
WORKER_PHASE_UNSPECIFIED: WorkerPhase
WORKER_PHASE_STARTED: WorkerPhase
WORKER_PHASE_LOADING: WorkerPhase
WORKER_PHASE_LOADED: WorkerPhase
WORKER_PHASE_CACHE_READY: WorkerPhase
WORKER_PHASE_READY: WorkerPhase
WORKER_PHASE_FAILED: WorkerPhase
KV_GROUP_KIND_UNSPECIFIED: KvGroupKind
KV_GROUP_KIND_KEYS_AND_VALUES: KvGroupKind
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_NOT_FINITE: RowStatus
ROW_STATUS_DEAD_END: RowStatus
ROW_STATUS_REFUSED: RowStatus

class WorkerDescription(_message.Message):
    __slots__ = ("model", "incarnation", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "rank", "world_size", "device", "kv_dtype", "kv_layout", "graph_batch_sizes", "attention_backend", "num_host_blocks", "max_granted_steps", "has_state_hashes", "sends_heartbeats", "attention_timings", "rank_addresses", "all_reduce", "gemm_timings", "rehearsed_steps", "prepares_grammars", "protocol_minor", "verifies_drafts", "draft_model", "kv_groups", "has_states", "num_state_snapshots", "tiers", "max_adapters", "adapters", "encodes_pictures", "keeps_pictures_whole", "kv_layout_hash", "transports")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_GRANTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_HASHES_FIELD_NUMBER: _ClassVar[int]
    SENDS_HEARTBEATS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ALL_REDUCE_FIELD_NUMBER: _ClassVar[int]
    GEMM_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REHEARSED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREPARES_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    VERIFIES_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    HAS_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ENCODES_PICTURES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_PICTURES_WHOLE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    incarnation: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    rank: int
    world_size: int
    device: str
    kv_dtype: str
    kv_layout: str
    graph_batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    attention_backend: str
    num_host_blocks: int
    max_granted_steps: int
    has_state_hashes: bool
    sends_heartbeats: bool
    attention_timings: _containers.RepeatedCompositeFieldContainer[AttentionTiming]
    rank_addresses: _containers.RepeatedScalarFieldContainer[str]
    all_reduce: str
    gemm_timings: _containers.RepeatedCompositeFieldContainer[_timing_pb2.GemmTiming]
    rehearsed_steps: _containers.RepeatedCompositeFieldContainer[_timing_pb2.RehearsedStep]
    prepares_grammars: bool
    protocol_minor: int
    verifies_drafts: bool
    draft_model: _types_pb2.ModelInfo
    kv_groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    has_states: bool
    num_state_snapshots: int
    tiers: _containers.RepeatedCompositeFieldContainer[KvTier]
    max_adapters: int
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Adapter]
    encodes_pictures: bool
    keeps_pictures_whole: bool
    kv_layout_hash: bytes
    transports: _containers.RepeatedCompositeFieldContainer[KvTransport]
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., incarnation: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., device: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., graph_batch_sizes: _Optional[_Iterable[int]] = ..., attention_backend: _Optional[str] = ..., num_host_blocks: _Optional[int] = ..., max_granted_steps: _Optional[int] = ..., has_state_hashes: bool = ..., sends_heartbeats: bool = ..., attention_timings: _Optional[_Iterable[_Union[AttentionTiming, _Mapping]]] = ..., rank_addresses: _Optional[_Iterable[str]] = ..., all_reduce: _Optional[str] = ..., gemm_timings: _Optional[_Iterable[_Union[_timing_pb2.GemmTiming, _Mapping]]] = ..., rehearsed_steps: _Optional[_Iterable[_Union[_timing_pb2.RehearsedStep, _Mapping]]] = ..., prepares_grammars: bool = ..., protocol_minor: _Optional[int] = ..., verifies_drafts: bool = ..., draft_model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., kv_groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., has_states: bool = ..., num_state_snapshots: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[KvTier, _Mapping]]] = ..., max_adapters: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.Adapter, _Mapping]]] = ..., encodes_pictures: bool = ..., keeps_pictures_whole: bool = ..., kv_layout_hash: _Optional[bytes] = ..., transports: _Optional[_Iterable[_Union[KvTransport, _Mapping]]] = ...) -> None: ...

class KvTransport(_message.Message):
    __slots__ = ("name", "handle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    handle: bytes
    def __init__(self, name: _Optional[str] = ..., handle: _Optional[bytes] = ...) -> None: ...

class KvTier(_message.Message):
    __slots__ = ("name", "num_blocks", "bytes_per_block")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_blocks: int
    bytes_per_block: int
    def __init__(self, name: _Optional[str] = ..., num_blocks: _Optional[int] = ..., bytes_per_block: _Optional[int] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("block_size", "window", "kind")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    window: int
    kind: KvGroupKind
    def __init__(self, block_size: _Optional[int] = ..., window: _Optional[int] = ..., kind: _Optional[_Union[KvGroupKind, str]] = ...) -> None: ...

class AttentionTiming(_message.Message):
    __slots__ = ("kind", "shape", "backend", "us")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    US_FIELD_NUMBER: _ClassVar[int]
    kind: str
    shape: str
    backend: str
    us: float
    def __init__(self, kind: _Optional[str] = ..., shape: _Optional[str] = ..., backend: _Optional[str] = ..., us: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("held_epoch",)
    HELD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    held_epoch: int
    def __init__(self, held_epoch: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("phase", "failure", "description", "epoch", "last_step_id", "num_live_slots", "decode_time", "is_attached", "unheard_ms", "refusal")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIME_FIELD_NUMBER: _ClassVar[int]
    IS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    phase: WorkerPhase
    failure: str
    description: WorkerDescription
    epoch: int
    last_step_id: int
    num_live_slots: int
    decode_time: _timing_pb2.DecodeTime
    is_attached: bool
    unheard_ms: int
    refusal: Refusal
    def __init__(self, phase: _Optional[_Union[WorkerPhase, str]] = ..., failure: _Optional[str] = ..., description: _Optional[_Union[WorkerDescription, _Mapping]] = ..., epoch: _Optional[int] = ..., last_step_id: _Optional[int] = ..., num_live_slots: _Optional[int] = ..., decode_time: _Optional[_Union[_timing_pb2.DecodeTime, _Mapping]] = ..., is_attached: bool = ..., unheard_ms: _Optional[int] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("epoch", "cause")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cause: str
    def __init__(self, epoch: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("path", "dtype", "served_model_name")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: str
    served_model_name: str
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[str] = ..., served_model_name: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class InitializeCacheRequest(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class InitializeCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class WarmUpRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WarmUpResponse(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: WorkerDescription
    def __init__(self, description: _Optional[_Union[WorkerDescription, _Mapping]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replaces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replaces: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replaces: bool = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "step", "cut", "prepare", "fetch", "store", "cancel_transfers", "prepare_adapters", "drop", "sequence", "checksum")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: SchedulerOutput
    cut: Cut
    prepare: PrepareGrammars
    fetch: FetchBlocks
    store: StoreBlocks
    cancel_transfers: CancelTransfers
    prepare_adapters: PrepareAdapters
    drop: DropBlocks
    sequence: int
    checksum: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[SchedulerOutput, _Mapping]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., prepare: _Optional[_Union[PrepareGrammars, _Mapping]] = ..., fetch: _Optional[_Union[FetchBlocks, _Mapping]] = ..., store: _Optional[_Union[StoreBlocks, _Mapping]] = ..., cancel_transfers: _Optional[_Union[CancelTransfers, _Mapping]] = ..., prepare_adapters: _Optional[_Union[PrepareAdapters, _Mapping]] = ..., drop: _Optional[_Union[DropBlocks, _Mapping]] = ..., sequence: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "epoch", "first_step_id", "heartbeat_interval_ms", "protocol_minor")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    first_step_id: int
    heartbeat_interval_ms: int
    protocol_minor: int
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., first_step_id: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., protocol_minor: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("description", "output", "skipped", "heartbeat", "grammar_prepared", "transfer_done", "adapter_prepared", "tier_contents", "sequence", "checksum")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_PREPARED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_DONE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PREPARED_FIELD_NUMBER: _ClassVar[int]
    TIER_CONTENTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    description: WorkerDescription
    output: ModelRunnerOutput
    skipped: Skipped
    heartbeat: Heartbeat
    grammar_prepared: GrammarPrepared
    transfer_done: TransferDone
    adapter_prepared: AdapterPrepared
    tier_contents: TierContents
    sequence: int
    checksum: int
    def __init__(self, description: _Optional[_Union[WorkerDescription, _Mapping]] = ..., output: _Optional[_Union[ModelRunnerOutput, _Mapping]] = ..., skipped: _Optional[_Union[Skipped, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., grammar_prepared: _Optional[_Union[GrammarPrepared, _Mapping]] = ..., transfer_done: _Optional[_Union[TransferDone, _Mapping]] = ..., adapter_prepared: _Optional[_Union[AdapterPrepared, _Mapping]] = ..., tier_contents: _Optional[_Union[TierContents, _Mapping]] = ..., sequence: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("first_step_id", "last_step_id")
    FIRST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    first_step_id: int
    last_step_id: int
    def __init__(self, first_step_id: _Optional[int] = ..., last_step_id: _Optional[int] = ...) -> None: ...

class Skipped(_message.Message):
    __slots__ = ("first_step_id", "last_step_id")
    FIRST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    first_step_id: int
    last_step_id: int
    def __init__(self, first_step_id: _Optional[int] = ..., last_step_id: _Optional[int] = ...) -> None: ...

class PrepareGrammars(_message.Message):
    __slots__ = ("preparations", "dropped_ids", "pictures")
    PREPARATIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_IDS_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    preparations: _containers.RepeatedCompositeFieldContainer[GrammarPreparation]
    dropped_ids: _containers.RepeatedScalarFieldContainer[int]
    pictures: _containers.RepeatedCompositeFieldContainer[PicturePreparation]
    def __init__(self, preparations: _Optional[_Iterable[_Union[GrammarPreparation, _Mapping]]] = ..., dropped_ids: _Optional[_Iterable[int]] = ..., pictures: _Optional[_Iterable[_Union[PicturePreparation, _Mapping]]] = ...) -> None: ...

class PicturePreparation(_message.Message):
    __slots__ = ("preparation_id", "content_id", "num_tokens", "pixels")
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    preparation_id: int
    content_id: bytes
    num_tokens: int
    pixels: _types_pb2.PicturePixels
    def __init__(self, preparation_id: _Optional[int] = ..., content_id: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., pixels: _Optional[_Union[_types_pb2.PicturePixels, _Mapping]] = ...) -> None: ...

class PrepareAdapters(_message.Message):
    __slots__ = ("preparations", "dropped_ids")
    PREPARATIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_IDS_FIELD_NUMBER: _ClassVar[int]
    preparations: _containers.RepeatedCompositeFieldContainer[AdapterPreparation]
    dropped_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, preparations: _Optional[_Iterable[_Union[AdapterPreparation, _Mapping]]] = ..., dropped_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AdapterPreparation(_message.Message):
    __slots__ = ("preparation_id", "adapter")
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    preparation_id: int
    adapter: _types_pb2.Adapter
    def __init__(self, preparation_id: _Optional[int] = ..., adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ...) -> None: ...

class AdapterPrepared(_message.Message):
    __slots__ = ("preparation_id", "problem")
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    preparation_id: int
    problem: str
    def __init__(self, preparation_id: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class GrammarPreparation(_message.Message):
    __slots__ = ("preparation_id", "grammar", "output_token_ids")
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    preparation_id: int
    grammar: str
    output_token_ids: bytes
    def __init__(self, preparation_id: _Optional[int] = ..., grammar: _Optional[str] = ..., output_token_ids: _Optional[bytes] = ...) -> None: ...

class GrammarPrepared(_message.Message):
    __slots__ = ("preparation_id", "problem")
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    preparation_id: int
    problem: str
    def __init__(self, preparation_id: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class FetchBlocks(_message.Message):
    __slots__ = ("transfer_id", "tier", "block_ids", "tier_block_ids", "keys", "peer", "source_block_ids", "contents")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    tier: str
    block_ids: bytes
    tier_block_ids: bytes
    keys: bytes
    peer: PeerKv
    source_block_ids: bytes
    contents: bytes
    def __init__(self, transfer_id: _Optional[int] = ..., tier: _Optional[str] = ..., block_ids: _Optional[bytes] = ..., tier_block_ids: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., peer: _Optional[_Union[PeerKv, _Mapping]] = ..., source_block_ids: _Optional[bytes] = ..., contents: _Optional[bytes] = ...) -> None: ...

class PeerKv(_message.Message):
    __slots__ = ("address", "incarnation", "transport", "handle", "server_name")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    transport: str
    handle: bytes
    server_name: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ..., transport: _Optional[str] = ..., handle: _Optional[bytes] = ..., server_name: _Optional[str] = ...) -> None: ...

class StoreBlocks(_message.Message):
    __slots__ = ("transfer_id", "tier", "block_ids", "tier_block_ids", "keys", "contents")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    tier: str
    block_ids: bytes
    tier_block_ids: bytes
    keys: bytes
    contents: bytes
    def __init__(self, transfer_id: _Optional[int] = ..., tier: _Optional[str] = ..., block_ids: _Optional[bytes] = ..., tier_block_ids: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., contents: _Optional[bytes] = ...) -> None: ...

class DropBlocks(_message.Message):
    __slots__ = ("tier", "keys", "all")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    tier: str
    keys: bytes
    all: bool
    def __init__(self, tier: _Optional[str] = ..., keys: _Optional[bytes] = ..., all: bool = ...) -> None: ...

class TierContents(_message.Message):
    __slots__ = ("tier", "keys")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    keys: bytes
    def __init__(self, tier: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class CancelTransfers(_message.Message):
    __slots__ = ("transfer_ids",)
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TransferDone(_message.Message):
    __slots__ = ("transfer_id", "num_blocks", "problem", "num_bytes", "duration_us", "queued_us")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    QUEUED_US_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    num_blocks: int
    problem: str
    num_bytes: int
    duration_us: int
    queued_us: int
    def __init__(self, transfer_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., problem: _Optional[str] = ..., num_bytes: _Optional[int] = ..., duration_us: _Optional[int] = ..., queued_us: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("num_frames_received", "num_frames_sent", "running_step_id", "running_ms", "is_draining")
    NUM_FRAMES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_SENT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_frames_received: int
    num_frames_sent: int
    running_step_id: int
    running_ms: int
    is_draining: bool
    def __init__(self, num_frames_received: _Optional[int] = ..., num_frames_sent: _Optional[int] = ..., running_step_id: _Optional[int] = ..., running_ms: _Optional[int] = ..., is_draining: bool = ...) -> None: ...

class SchedulerOutput(_message.Message):
    __slots__ = ("step_id", "ack_step_id", "reset", "freed_slots", "new_sequences", "appended_slots", "appended_block_ids", "same_rows", "slots", "num_scheduled", "granted_steps", "wants_state", "swapped_out_block_ids", "to_host_block_ids", "from_host_block_ids", "swapped_in_block_ids", "copied_from_block_ids", "copied_to_block_ids", "num_drafted", "draft_token_ids", "appended_to_groups", "state_save_slots", "state_save_positions", "state_save_snapshots")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ACK_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    FREED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    APPENDED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAME_ROWS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    WANTS_STATE_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TO_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FROM_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FROM_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_TO_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_TO_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STATE_SAVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_SAVE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    STATE_SAVE_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    ack_step_id: int
    reset: bool
    freed_slots: bytes
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    appended_slots: bytes
    appended_block_ids: bytes
    same_rows: bool
    slots: bytes
    num_scheduled: bytes
    granted_steps: int
    wants_state: bool
    swapped_out_block_ids: bytes
    to_host_block_ids: bytes
    from_host_block_ids: bytes
    swapped_in_block_ids: bytes
    copied_from_block_ids: bytes
    copied_to_block_ids: bytes
    num_drafted: bytes
    draft_token_ids: bytes
    appended_to_groups: _containers.RepeatedCompositeFieldContainer[AppendedBlocks]
    state_save_slots: bytes
    state_save_positions: bytes
    state_save_snapshots: bytes
    def __init__(self, step_id: _Optional[int] = ..., ack_step_id: _Optional[int] = ..., reset: bool = ..., freed_slots: _Optional[bytes] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., appended_slots: _Optional[bytes] = ..., appended_block_ids: _Optional[bytes] = ..., same_rows: bool = ..., slots: _Optional[bytes] = ..., num_scheduled: _Optional[bytes] = ..., granted_steps: _Optional[int] = ..., wants_state: bool = ..., swapped_out_block_ids: _Optional[bytes] = ..., to_host_block_ids: _Optional[bytes] = ..., from_host_block_ids: _Optional[bytes] = ..., swapped_in_block_ids: _Optional[bytes] = ..., copied_from_block_ids: _Optional[bytes] = ..., copied_to_block_ids: _Optional[bytes] = ..., num_drafted: _Optional[bytes] = ..., draft_token_ids: _Optional[bytes] = ..., appended_to_groups: _Optional[_Iterable[_Union[AppendedBlocks, _Mapping]]] = ..., state_save_slots: _Optional[bytes] = ..., state_save_positions: _Optional[bytes] = ..., state_save_snapshots: _Optional[bytes] = ...) -> None: ...

class AppendedBlocks(_message.Message):
    __slots__ = ("group", "slots", "block_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    group: int
    slots: bytes
    block_ids: bytes
    def __init__(self, group: _Optional[int] = ..., slots: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("slot", "request_id", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "sampling", "prompt_output_begin", "prompt_only", "grammar_preparation", "trace", "group_block_ids", "state_snapshot", "adapter_preparation", "pictures")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_OUTPUT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ONLY_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_PREPARATION_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    STATE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PREPARATION_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes
    sampling: RowSampling
    prompt_output_begin: int
    prompt_only: bool
    grammar_preparation: int
    trace: _types_pb2.TraceContext
    group_block_ids: _containers.RepeatedScalarFieldContainer[bytes]
    state_snapshot: int
    adapter_preparation: int
    pictures: _containers.RepeatedCompositeFieldContainer[PlacedPicture]
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[RowSampling, _Mapping]] = ..., prompt_output_begin: _Optional[int] = ..., prompt_only: bool = ..., grammar_preparation: _Optional[int] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., group_block_ids: _Optional[_Iterable[bytes]] = ..., state_snapshot: _Optional[int] = ..., adapter_preparation: _Optional[int] = ..., pictures: _Optional[_Iterable[_Union[PlacedPicture, _Mapping]]] = ...) -> None: ...

class PlacedPicture(_message.Message):
    __slots__ = ("position", "preparation_id")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREPARATION_ID_FIELD_NUMBER: _ClassVar[int]
    position: int
    preparation_id: int
    def __init__(self, position: _Optional[int] = ..., preparation_id: _Optional[int] = ...) -> None: ...

class RowSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words_token_ids", "logprobs", "grammar", "prompt_logprobs", "pooling", "logprob_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[_types_pb2.LogitBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenSequence]
    logprobs: int
    grammar: str
    prompt_logprobs: int
    pooling: _types_pb2.Pooling
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[_types_pb2.LogitBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[_types_pb2.TokenSequence, _Mapping]]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., pooling: _Optional[_Union[_types_pb2.Pooling, str]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ModelRunnerOutput(_message.Message):
    __slots__ = ("step_id", "token_ids", "row_status", "error", "timings", "logprobs", "state", "row_errors", "prompt_outputs", "num_sampled")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    token_ids: bytes
    row_status: bytes
    error: str
    timings: _timing_pb2.StepTimings
    logprobs: _types_pb2.LogprobColumns
    state: StateHashes
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    prompt_outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PromptOutput]
    num_sampled: bytes
    def __init__(self, step_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., row_status: _Optional[bytes] = ..., error: _Optional[str] = ..., timings: _Optional[_Union[_timing_pb2.StepTimings, _Mapping]] = ..., logprobs: _Optional[_Union[_types_pb2.LogprobColumns, _Mapping]] = ..., state: _Optional[_Union[StateHashes, _Mapping]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., prompt_outputs: _Optional[_Iterable[_Union[_types_pb2.PromptOutput, _Mapping]]] = ..., num_sampled: _Optional[bytes] = ...) -> None: ...

class StateHashes(_message.Message):
    __slots__ = ("slots", "hashes")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    hashes: bytes
    def __init__(self, slots: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "message")
    ROW_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    row: int
    message: str
    def __init__(self, row: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
