"""Permissions that the guide names: enough for what it says, and for nothing beside it."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import endpoint

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.cli import main
from featcache.errors import RemoteError
from featcache.remote import RemoteOptions, requests_to
from featcache.transfer import pull, push

__all__ = ["endpoint"]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "remote.md"
As = Callable[[str], RemoteOptions]


def _enforce(endpoint: str, after: str) -> None:
    """Have moto check permissions after so many requests."""
    plain = {"Content-Type": "text/plain"}
    url = f"{endpoint}/moto-api/reset-auth"
    request = urllib.request.Request(url, data=after.encode(), headers=plain)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


@pytest.fixture
def user(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[As]:
    """Options with which a user asks: "reader" or "writer", with the policies of the guide."""
    from botocore.session import get_session

    policies = re.findall(r"```json\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    known = {"aws_access_key_id": "root", "aws_secret_access_key": "hush"}
    clients = get_session().create_client
    there: dict[str, Any] = {"endpoint_url": endpoint, "region_name": "us-east-1", **known}
    s3, iam = clients("s3", **there), clients("iam", **there)
    s3.create_bucket(Bucket="bucket")
    keys = {}
    for name, policy in zip(("reader", "writer"), policies, strict=True):
        json.loads(policy)
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="mine", PolicyDocument=policy)
        keys[name] = iam.create_access_key(UserName=name)["AccessKey"]

    def as_user(name: str) -> RemoteOptions:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys[name]["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys[name]["SecretAccessKey"])
        requests_to.cache_clear()
        return RemoteOptions(endpoint=endpoint, region="us-east-1", retry_s=0.3)

    _enforce(endpoint, "0")
    try:
        yield as_user
    finally:
        _enforce(endpoint, "inf")
        requests_to.cache_clear()


def test_the_policies_of_the_guide_are_enough_and_no_more(
    user: As, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(call: Callable[..., object], *given: object) -> str:
        with pytest.raises(RemoteError, match="permission denied") as told:
            call(*given, remote=how)
        return str(told.value)

    cache, url = tmp_path / "c", "s3://bucket/train"
    with CacheWriter(cache, [FeatureStorageConfig("fbank")]) as writer:
        writer.write("utt", {"fbank": np.ones((20, 8), np.float32)})
    how = user("reader")
    assert "listed" in refused(push, cache, url)
    how = user("writer")
    push(cache, url, remote=how)
    pull(url, tmp_path / "pulled", remote=how)
    refused(push, cache, "s3://bucket/other")
    with featcache.open(cache) as here:
        here.tag("paper")
    push(cache, url, remote=how)
    how = user("reader")
    there = featcache.open(url, remote=how, verify="arrays")
    assert there.read("utt", "fbank").sum() == 160
    there.refresh()
    refused(featcache.open, "s3://bucket/other")
    refused(push, cache, url)
    (typed,) = re.findall("`featcache (.+?)`", refused(pull, url, tmp_path / "again"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(how.endpoint))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    main.main([*shlex.split(typed), "-q"], "featcache", standalone_mode=False)
    assert featcache.open(tmp_path / "again").read("utt", "fbank").sum() == 160
