"""Whole messages as the services exchange them when one finds, attaches to and leaves another.

Each field that the receiver acts on is set. `test_wire.py` holds their bytes.
"""

from google.protobuf.message import Message

from pagewire.v1 import fleet_pb2, scheduler_pb2, timing_pb2, types_pb2, worker_pb2
from wire.columns import UINT64, pack

MODEL = types_pb2.ModelInfo(
    model="m",
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    max_model_len=2048,
    eos_token_ids=[2],
    config_sha256="c" * 64,
    tokenizer_sha256="d" * 64,
    dtype="bfloat16",
    llguidance_version="1.3.0",
    quantization="gptq, 4 bits, group 128",
)
DESCRIPTION = worker_pb2.WorkerDescription(
    model=MODEL,
    incarnation=(1 << 62) + 5,
    num_blocks=4097,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    world_size=1,
    device="cuda",
    kv_dtype="bfloat16",
    attention_backend="triton",
    num_host_blocks=128,
    max_granted_steps=64,
    has_state_hashes=True,
    sends_heartbeats=True,
    prepares_grammars=True,
    rehearsed_steps=[timing_pb2.RehearsedStep(num_tokens=512, seconds=0.25)],
    protocol_minor=1,
)

PIXELS = types_pb2.PicturePixels(
    values=bytes(range(12)),
    num_rows=4,
    grid=[1, 2, 2],
    means=[127.5] * 3,
    deviations=[127.5] * 3,
)

HANDSHAKES: dict[str, Message] = {
    "a worker describes itself": worker_pb2.DescribeResponse(
        phase=worker_pb2.WORKER_PHASE_READY,
        description=DESCRIPTION,
        epoch=2,
        last_step_id=300,
        num_live_slots=3,
    ),
    "a worker with KV groups": worker_pb2.AttachResponse(
        description=worker_pb2.WorkerDescription(
            model=MODEL,
            num_blocks=4097,
            block_size=16,
            protocol_minor=3,
            kv_groups=[
                worker_pb2.KvGroup(block_size=16, kind=worker_pb2.KV_GROUP_KIND_KEYS_AND_VALUES),
                worker_pb2.KvGroup(
                    block_size=32, window=1024, kind=worker_pb2.KV_GROUP_KIND_KEYS_AND_VALUES
                ),
            ],
        )
    ),
    "a worker that is not ready": worker_pb2.DescribeResponse(
        phase=worker_pb2.WORKER_PHASE_FAILED, failure="ValueError: no weights"
    ),
    "attach, heartbeats and minor version": worker_pb2.AttachRequest(
        hello=worker_pb2.Hello(
            protocol_version=2,
            epoch=3,
            first_step_id=301,
            heartbeat_interval_ms=500,
            protocol_minor=1,
        )
    ),
    "the worker's first frame": worker_pb2.AttachResponse(description=DESCRIPTION),
    "a heartbeat": worker_pb2.AttachResponse(
        heartbeat=worker_pb2.Heartbeat(
            num_frames_received=12, num_frames_sent=11, running_step_id=312, running_ms=40
        )
    ),
    "a row that the worker refuses, in a sealed frame": worker_pb2.AttachResponse(
        output=worker_pb2.ModelRunnerOutput(
            step_id=7,
            token_ids=bytes(4),
            row_status=b"\3",
            row_errors=[worker_pb2.RowError(message="stop_token_ids: 99 is not below 64")],
        ),
        sequence=(1 << 32) - 1,
        checksum=0,
    ),
    "a worker that was asked to end": worker_pb2.AttachResponse(
        heartbeat=worker_pb2.Heartbeat(num_frames_received=12, num_frames_sent=12, is_draining=True)
    ),
    "a worker registers": fleet_pb2.RegisterRequest(
        address="worker-1.workers:50053", incarnation=(1 << 62) + 5
    ),
    "its lease": fleet_pb2.RegisterResponse(lease_s=15.0),
    "a worker deregisters": fleet_pb2.DeregisterRequest(
        address="worker-1.workers:50053", incarnation=(1 << 62) + 5
    ),
}

STEPS: dict[str, Message] = {
    "eight granted steps that ask for hashes": worker_pb2.AttachRequest(
        step=worker_pb2.SchedulerOutput(
            step_id=301, ack_step_id=300, same_rows=True, granted_steps=8, wants_state=True
        )
    ),
    "a sequence after a snapshot of its states, and snapshots to make": worker_pb2.AttachRequest(
        step=worker_pb2.SchedulerOutput(
            step_id=7,
            new_sequences=[
                worker_pb2.NewSequence(
                    slot=2,
                    token_ids=pack([*range(20)]),
                    num_prompt_tokens=20,
                    num_computed_tokens=16,
                    block_ids=pack([5, 6]),
                    sampling=worker_pb2.RowSampling(temperature=0.0, top_p=1.0),
                    state_snapshot=3,
                )
            ],
            slots=pack([2]),
            num_scheduled=pack([4]),
            state_save_slots=pack([2]),
            state_save_positions=pack([20]),
            state_save_snapshots=pack([1]),
        )
    ),
    "a sequence and a block for two KV groups": worker_pb2.AttachRequest(
        step=worker_pb2.SchedulerOutput(
            step_id=302,
            ack_step_id=301,
            new_sequences=[
                worker_pb2.NewSequence(
                    slot=1,
                    token_ids=pack([1, 4093, 198]),
                    num_prompt_tokens=3,
                    block_ids=pack([7]),
                    group_block_ids=[pack([8])],
                    sampling=worker_pb2.RowSampling(repetition_penalty=1.0),
                )
            ],
            appended_slots=pack([0]),
            appended_block_ids=pack([9]),
            appended_to_groups=[
                worker_pb2.AppendedBlocks(group=1, slots=pack([0]), block_ids=pack([10]))
            ],
            slots=pack([0, 1]),
            num_scheduled=pack([1, 3]),
        )
    ),
    "a cut": worker_pb2.AttachRequest(cut=worker_pb2.Cut(first_step_id=303, last_step_id=308)),
    "what was skipped": worker_pb2.AttachResponse(
        skipped=worker_pb2.Skipped(first_step_id=304, last_step_id=308)
    ),
    "prepare a grammar, drop another": worker_pb2.AttachRequest(
        prepare=worker_pb2.PrepareGrammars(
            preparations=[
                worker_pb2.GrammarPreparation(
                    preparation_id=7, grammar='{"x":1}', output_token_ids=pack([504])
                )
            ],
            dropped_ids=[6],
        )
    ),
    "a worker that encodes pictures": worker_pb2.AttachResponse(
        description=worker_pb2.WorkerDescription(
            model=types_pb2.ModelInfo(model="m", takes_pictures=True),
            encodes_pictures=True,
            keeps_pictures_whole=True,
        )
    ),
    "prepare a picture": worker_pb2.AttachRequest(
        prepare=worker_pb2.PrepareGrammars(
            pictures=[
                worker_pb2.PicturePreparation(
                    preparation_id=8, content_id=bytes(range(16)), num_tokens=1, pixels=PIXELS
                )
            ]
        )
    ),
    "a sequence with two places of one picture": worker_pb2.AttachRequest(
        step=worker_pb2.SchedulerOutput(
            step_id=9,
            new_sequences=[
                worker_pb2.NewSequence(
                    slot=1,
                    token_ids=pack([150, 5, 150]),
                    num_prompt_tokens=3,
                    block_ids=pack([7]),
                    sampling=worker_pb2.RowSampling(top_p=1.0),
                    pictures=[
                        worker_pb2.PlacedPicture(position=0, preparation_id=8),
                        worker_pb2.PlacedPicture(position=2, preparation_id=8),
                    ],
                )
            ],
            slots=pack([1]),
            num_scheduled=pack([3]),
        )
    ),
    "a grammar that cannot be followed": worker_pb2.AttachResponse(
        grammar_prepared=worker_pb2.GrammarPrepared(preparation_id=7, problem="a dead end")
    ),
    "a worker with a tier": worker_pb2.AttachResponse(
        description=worker_pb2.WorkerDescription(
            protocol_minor=5,
            tiers=[worker_pb2.KvTier(name="host", num_blocks=4096, bytes_per_block=2**31)],
        )
    ),
    "blocks to fill from a tier": worker_pb2.AttachRequest(
        fetch=worker_pb2.FetchBlocks(
            transfer_id=2**64 - 1,
            tier="host",
            block_ids=pack([5, 2**31 - 1]),
            tier_block_ids=pack([1, 2]),
            keys=pack([2**64 - 1, 0, 7, 2**63], UINT64),
        )
    ),
    "blocks to keep in a tier": worker_pb2.AttachRequest(
        store=worker_pb2.StoreBlocks(
            transfer_id=3,
            tier="host",
            block_ids=pack([5]),
            tier_block_ids=pack([9]),
            keys=pack([11, 12], UINT64),
        )
    ),
    "blocks to fill from the disk": worker_pb2.AttachRequest(
        fetch=worker_pb2.FetchBlocks(
            transfer_id=4,
            tier="disk",
            block_ids=pack([5]),
            keys=pack([2**64 - 1, 0], UINT64),
            contents=b"parent and tokens",
        )
    ),
    "blocks to keep on the disk": worker_pb2.AttachRequest(
        store=worker_pb2.StoreBlocks(
            transfer_id=5,
            tier="disk",
            block_ids=pack([5]),
            keys=pack([11, 12], UINT64),
            contents=b"parent and tokens",
        )
    ),
    "contents to drop": worker_pb2.AttachRequest(
        drop=worker_pb2.DropBlocks(tier="disk", keys=pack([2**64 - 1, 0], UINT64), all=True)
    ),
    "what a disk holds": worker_pb2.AttachResponse(
        tier_contents=worker_pb2.TierContents(tier="disk", keys=pack([11, 12], UINT64))
    ),
    "transfers to end": worker_pb2.AttachRequest(
        cancel_transfers=worker_pb2.CancelTransfers(transfer_ids=[3, 2**64 - 1])
    ),
    "a transfer that ended early": worker_pb2.AttachResponse(
        transfer_done=worker_pb2.TransferDone(
            transfer_id=2**64 - 1,
            num_blocks=1,
            problem="it was cancelled",
            num_bytes=2**40,
            duration_us=6_400_000,
            queued_us=3,
        )
    ),
    "a step that failed": worker_pb2.AttachResponse(
        output=worker_pb2.ModelRunnerOutput(step_id=301, error="CUDA error")
    ),
}

SESSIONS: dict[str, Message] = {
    "submit a prompt with a picture": scheduler_pb2.SessionRequest(
        submit=scheduler_pb2.Submit(
            handle=3,
            request_id="r",
            prompt_token_ids=pack([151, 150, 152]),
            pictures=[
                types_pb2.Picture(
                    position=1, num_tokens=1, content_id=bytes(range(16)), pixels=PIXELS
                )
            ],
        )
    ),
    "submit again after a scheduler": scheduler_pb2.SessionRequest(
        submit=scheduler_pb2.Submit(
            handle=7,
            request_id="acme/r-1",
            prompt_token_ids=pack([1, 4093, 198, 504, 2]),
            num_prompt_tokens=3,
            num_deaths=1,
            sampling=types_pb2.SamplingParams(temperature=0.5, seed=9, max_tokens=128),
            tenant="acme",
            priority=-2,
            timeout_s=9.5,
            cache_salt="s",
            fork_group="f",
            skip_prefix_cache=True,
        )
    ),
    "submit a turn of a session": scheduler_pb2.SessionRequest(
        submit=scheduler_pb2.Submit(
            handle=8,
            request_id="acme/r-2",
            prompt_token_ids=pack([1, 4093, 198]),
            session=types_pb2.SessionHint(
                session_id="a", parent_session_id="b", ttl_s=300.0, prefix_key="k"
            ),
        )
    ),
    "end a session": scheduler_pb2.SessionRequest(
        end_session=scheduler_pb2.EndSession(session_id="a", cache_salt="s")
    ),
    "a request is admitted": scheduler_pb2.SessionResponse(
        admitted=[scheduler_pb2.Admitted(handle=7, cached_tokens=64)]
    ),
    "a request is refused for overload": scheduler_pb2.SessionResponse(
        finished=[
            scheduler_pb2.Finished(
                handle=7,
                reason=types_pb2.FINISH_REASON_ERROR,
                status_code=8,
                message="the queue is full",
                retry_after_s=1.5,
            )
        ]
    ),
    "a gateway says who it is": scheduler_pb2.SessionRequest(
        hello=scheduler_pb2.SessionHello(gateway=(1 << 63) + 5), sequence=1, checksum=0
    ),
    "a scheduler says who it is": scheduler_pb2.SessionResponse(
        greeting=scheduler_pb2.SessionGreeting(instance=(1 << 63) + 7), sequence=1, checksum=7
    ),
    "a scheduler that will end": scheduler_pb2.SessionResponse(draining=True),
    "what a gateway asks first": scheduler_pb2.GetStatusResponse(
        ready=True,
        model=MODEL,
        num_blocks=4096,
        num_free_blocks=4000,
        block_size=16,
        policy="fcfs",
        session_version=1,
        groups=[
            scheduler_pb2.WorkerGroupStatus(
                address="10.0.0.5:50053",
                ready=True,
                source="--worker-dns workers:50053",
                draining="the worker is shutting down",
            )
        ],
    ),
}

EXCHANGED = HANDSHAKES | STEPS | SESSIONS
