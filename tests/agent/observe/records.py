"""A decision as placement makes one, for the tests of those who keep and explain it."""

from router_core.ids import NodeId
from router_core.placement.reasons import Action, HintOutcome, Reason
from router_core.placement.record import (
    Alternative,
    Attempt,
    Candidate,
    DecisionRecord,
    Ending,
    Estimate,
    Excluded,
    Factors,
    RequestFacts,
    ViewFacts,
)
from router_core.placement.request.request import HintNote


def candidate(
    row: str, score: float, *, resident: bool = True, wait: float = 0.0, out: str | None = None
) -> Candidate:
    load = 0.0 if resident else 8.0
    ttft = 0.01 + wait + load + 0.3
    return Candidate(
        row=row,
        model="llama3.2:3b",
        resident=resident,
        free=True,
        age_ms=400,
        period_ms=2_000,
        est=Estimate(
            wait=wait,
            load=load,
            prefill=0.3,
            net=0.01,
            tpot=0.011,
            ttft=ttft,
            ect=ttft + 2.8,
            sd=0.3,
            ahead=1.25 * wait,
            cost=ttft + 0.28 + (3.0 if wait else 0.0),
        ),
        f=Factors(slo=min(1.0, score), memory=0.0, switch=0.0, pressure=0.1, speed=0.1),
        adj=0.0,
        penalty=0.0,
        hint=0.0,
        affinity=0.0,
        capacity=1.0,
        queue_risk=0.0,
        score=score,
        out=out,
    )


def record(decision_id: str = "A" * 26) -> DecisionRecord:
    """A request that preferred one node, was routed to a warm one, failed over once and ended well."""
    return DecisionRecord(
        id=decision_id,
        request_id="req-1",
        boot_ms=5_000,
        router=NodeId("a" * 52),
        policy="balanced",
        policy_hash="3f2a91c0" * 4,
        seed="00" * 8,
        view=ViewFacts(gen=12, max_age_ms=700, m_r=3.0, rows=5),
        req=RequestFacts(
            model_asked="llama3.2",
            model_resolved="llama3.2:3b",
            digest=None,
            match="exact",
            dialect="chat",
            requires=("tools",),
            stream=True,
            prompt_tokens=1_200,
            output_tokens=256,
            ctx_need=1_636,
            images=0,
            request_class="interactive",
            slo_ttft_ms=2_000,
            slo_tpot_ms=100,
            deadline_ms=600_000,
            locality="mesh",
            caller="local",
            session=None,
        ),
        hints=(HintNote(hint="prefer", ref="@tiny", outcome=HintOutcome.OUTSCORED),),
        excluded=(
            Excluded(row="@laptop/ollama", code=Reason.PRESSURE, detail="activity"),
            Excluded(row="@old/llamacpp", code=Reason.CAPABILITY, detail="tools"),
        ),
        excluded_counts={"pressure": 1, "capability": 1},
        candidates=(
            candidate("@atlas/ollama", 0.03),
            candidate("@borg/vllm", 0.24, wait=1.65),
            candidate("@tiny/ollama", 0.64, resident=False, out="veto"),
        ),
        full=True,
        action=Action.ROUTE,
        chosen="@atlas/ollama",
        reason=Reason.NATIVE,
        margin=0.21,
        degraded=(),
        alternatives=(
            Alternative(row="@borg/vllm", score=0.24, top_factor="slo"),
            Alternative(row="@tiny/ollama", score=0.64, top_factor="memory"),
        ),
        attempts=(Attempt(row="@atlas/ollama", start_ms=2, connect_ms=3, first_byte_ms=280, result="done"),),
        outcome=Ending(
            status=200, total_ms=3_100, ttft_ms=280, out_tokens=251, err_ttft=-0.1, err_ect=-0.003
        ),
    )
