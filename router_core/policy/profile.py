"""Numbers that learning is tuned by, validated on construction."""

from dataclasses import dataclass

from router_core.errors import LocalMisuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePolicy:
    """How fast profiles learn, what they start from and where they are clamped. Rates in tokens/s and bytes/s."""

    rate: float = 0.1
    prior_weight: float = 5.0
    claim_cap: int = 20
    sd_least: float = 0.1
    sd_most: float = 0.7
    sd_untried: float = 0.7
    sd_few: float = 0.5
    few: int = 10
    outlier_sds: float = 3.0
    outlier_streak: int = 3
    loads_kept: int = 64
    outputs_kept: int = 64
    output_quantile: float = 0.7
    usual_prompt_tokens: float = 1_000.0
    usual_output_tokens: float = 200.0
    usual_weight: int = 4
    usual_kept: int = 256
    success_half_life_ms: int = 86_400_000
    least_prompt_tokens: int = 128
    least_counted_tokens: int = 64
    telling_output_tokens: int = 32
    least_gen_share: float = 0.2
    beta: float = 0.1
    bytes_per_token: float = 3.6
    bytes_per_token_least: float = 1.5
    bytes_per_token_most: float = 8.0
    gpu_bytes_per_s: float = 300e9
    cpu_bytes_per_s: float = 40e9
    bandwidth_share: float = 0.6
    prompt_over_gen: float = 30.0
    load_bytes_per_s: float = 1.19 * 2**30
    unknown_model_bytes: float = 5e9
    gen_most: float = 2_000.0
    prompt_most: float = 200_000.0
    load_least_s: float = 0.05
    calibration_least: float = 0.02
    calibration_most: float = 5.0
    calibration_alike_most: float = 50.0
    profiles_kept: int = 2_048
    names_kept: int = 512

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise LocalMisuse(f"rate is {self.rate}, allowed is 0..1")
        if not 0.0 < self.sd_least <= self.sd_most:
            raise LocalMisuse("log spreads must satisfy 0 < least <= most")
        if not 0.0 < self.output_quantile < 1.0:
            raise LocalMisuse(f"output_quantile is {self.output_quantile}, allowed is 0..1")
        if min(self.loads_kept, self.outputs_kept, self.profiles_kept, self.names_kept) < 1:
            raise LocalMisuse("every table of profiles keeps at least one entry")
