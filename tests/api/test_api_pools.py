"""``GET /pools``: the router's status whole, for operators and for nobody else."""

from __future__ import annotations

import json

import msgspec
from api_server import serving

from headwater.api.config import ApiConfig, ApiKey
from headwater.api.pools import PoolsBody


def test_the_answer_is_the_routers_status_as_json() -> None:
    with serving() as served:
        answer = served.get("/pools")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        status = served.generator.status()
        body = msgspec.json.decode(answer.content, type=PoolsBody)
        assert body.workers == status.workers
        assert body.buckets == status.buckets
        assert body.ready is status.ready
        assert set(json.loads(answer.content)) == set(PoolsBody.__slots__)


def test_it_is_guarded_like_the_metrics_page() -> None:
    with serving(ApiConfig(keys=(ApiKey.unnamed("sk-1"),))) as served:
        for path in ("/metrics", "/pools"):
            assert served.get(path).status_code == 401
            assert served.get(path, Authorization="Bearer sk-1").status_code == 200
