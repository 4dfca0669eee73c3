"""Which workers of a graph have been silent for too long."""

from __future__ import annotations

from penstock.policy.graph_silence import Silence


def test_silence_counts_only_while_the_client_listens() -> None:
    silence = Silence(["a", "b"], 4.0)
    assert silence.too_long(1000.0) == {}  # the first look is a late one
    for now in range(1001, 1004):
        silence.hear("a", now)
        assert silence.too_long(now) == {}
    assert silence.too_long(1010.0) == {}  # kept from running for 7 s: the answers lie there unread
    for now in range(1011, 1015):
        silence.hear("a", now)
        assert silence.too_long(now) == {}
    assert silence.too_long(1015.0) == {"b": 5.0}
    assert Silence(["a"], None).too_long(1000.0) == {}


def test_silence_does_not_count_while_a_large_message_is_on_its_way() -> None:
    silence = Silence(["a", "b"], 4.0)
    silence.too_long(1000.0)
    silence.send("a", 100, 1000.0)
    silence.send("b", 50 << 20, 1000.0)
    silence.hear("a", 1001.0, 999.0)
    silence.hear("b", 1001.0, 999.0)  # it was asked before
    for now in range(1001, 1006):
        assert silence.too_long(now) == {}
    assert silence.too_long(1007.0) == {"a": 6.0}
    silence.hear("b", 1007.0, 1006.5)  # it was asked behind the message, which has arrived
    for now in range(1008, 1012):
        assert "b" not in silence.too_long(now)
    assert silence.too_long(1012.0)["b"] == 5.0
