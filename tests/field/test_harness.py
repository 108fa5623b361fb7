"""The harness of field cases itself: one request through another node to a scripted engine, whole and streamed."""

from pathlib import Path

from tests.support.field import OpenAiEngine, chat, mesh, served_by


async def test_a_request_at_one_node_is_served_by_the_engine_of_another(tmp_path: Path) -> None:
    engine = OpenAiEngine(models={"m": 4096})
    async with engine.serving() as url, mesh(tmp_path, alpha=[url], beta=[]) as cluster:
        whole = await chat(cluster["beta"], max_tokens=3)
        streamed = await chat(cluster["beta"], stream=True)
    assert (whole.status, served_by(whole)) == (200, "alpha")
    assert whole.body["usage"]["completion_tokens"] == 3
    assert streamed.raw.endswith(b"data: [DONE]\n\n")
    assert [asked.body["model"] for asked in engine.asked] == ["m", "m"]
    assert engine.most == 1
