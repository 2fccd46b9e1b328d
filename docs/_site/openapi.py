"""Describes the routes of a server in OpenAPI 3.1, one file for each protocol.

The routes and the rights that they need come from the router, schemas of bodies from the types that
parse them. What a route is for is said here; a route without a line here fails the build.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

import streamfold
from streamfold.server.http.router import OtherRule, Route
from streamfold.wire.durable_streams import subscriptions
from streamfold.wire.s2.resources import BasinConfigJson, StreamConfigJson

Schema = dict[str, Any]

#: Bodies that types of the code describe, by the name that operations refer to.
_TYPES: Final = {
    "StreamConfig": StreamConfigJson,
    "BasinConfig": BasinConfigJson,
    "SubscriptionRequest": subscriptions.SubscriptionRequest,
    "SubscriptionView": subscriptions.SubscriptionView,
    "StreamsRequest": subscriptions.StreamsRequest,
    "ClaimRequest": subscriptions.ClaimRequest,
    "ClaimView": subscriptions.ClaimView,
    "AckRequest": subscriptions.AckRequest,
    "AckView": subscriptions.AckView,
    "ReleaseRequest": subscriptions.ReleaseRequest,
}


def _object(required: str = "", **properties: Schema | str) -> Schema:
    members = {
        name: {"type": kind} if isinstance(kind, str) else kind for name, kind in properties.items()
    }
    return {"type": "object", "properties": members} | (
        {"required": required.split()} if required else {}
    )


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_POSITION: Final = _object("seq_num timestamp", seq_num="integer", timestamp="integer")
_HEADERS: Final = _array(_array({"type": "string"}))
#: Bodies that are parsed and written without a type of their own.
_WRITTEN: Final[dict[str, Schema]] = {
    "Error": _object("code message", code="string", message="string"),
    "AppendInput": _object(
        "records",
        records=_array(_object(body="string", headers=_HEADERS, timestamp="integer")),
        match_seq_num="integer",
        fencing_token="string",  # noqa: S106 - a type
    ),
    "AppendAck": _object("start end tail", start=_POSITION, end=_POSITION, tail=_POSITION),
    "ReadBatch": _object(
        "records",
        records=_array(
            _object("seq_num timestamp", seq_num="integer", timestamp="integer", body="string",
                    headers=_HEADERS)
        ),
        tail=_POSITION,
    ),
    "Tail": _object("tail", tail=_POSITION),
    "TailsInput": _object("streams", streams=_array({"type": "string"})),
    "Tails": _object(
        "tails",
        tails=_array(
            _object("stream", stream="string", tail=_POSITION, status="integer", error=_ref("Error"))
        ),
    ),
    "CreateStream": _object("stream", stream="string", config=_ref("StreamConfig")),
    "CreateBasin": _object("basin", basin="string", config=_ref("BasinConfig"), location="string"),
    "EnsureBasin": _object(config=_ref("BasinConfig"), location="string"),
    "StreamInfo": _object("name created_at", name="string", created_at="string"),
    "StreamPage": _object("streams has_more", streams=_array(_ref("StreamInfo")), has_more="boolean"),
    "BasinInfo": _object("name created_at state", name="string", created_at="string", state="string"),
    "BasinPage": _object("basins has_more", basins=_array(_ref("BasinInfo")), has_more="boolean"),
    "AccessToken": _object("id", id="string", scope="object", expires_at="string"),
    "IssuedToken": _object("access_token", access_token="string"),  # noqa: S106 - a type
    "TokenPage": _object(
        "access_tokens has_more", access_tokens=_array(_ref("AccessToken")), has_more="boolean"
    ),
    "Metrics": _object("values", values=_array({"type": "object"})),
    "Busiest": _object(
        "seconds streams",
        seconds="number",
        streams=_array(
            _object("basin stream records_per_second bytes_per_second", basin="string", stream="string",
                    records_per_second="number", bytes_per_second="number")
        ),
    ),
    "Damage": _object(
        "summary read_only places files",
        summary=_array({"type": "string"}),
        read_only="boolean",
        places=_array(
            _object("effect", effect="string", file="string", basin="string", stream="string",
                    first_seq_num="integer", next_seq_num="integer")
        ),
        files=_array({"type": "string"}),
    ),
    "Location": _object("name", name="string"),
    "Locations": _array(_ref("Location")),
    "LocationName": {"type": "string"},
    "Snapshots": _array({"type": "object"}),
    "Origin": _object("seq_num sub_offset", stream="string", seq_num="integer", sub_offset="integer"),
    "Fork": _object(
        "stream origin created_at", stream="string", origin=_ref("Origin"), created_at="integer",
        deleted_at="integer",
    ),
    "ForkPage": _object("forks", origin=_ref("Origin"), forks=_array(_ref("Fork")), next="integer"),
    "Producer": _object(
        "id epoch next_seq last_seen_at", id="string", epoch="integer", next_seq="integer",
        last_seen_at="integer",
    ),
    "ProducerPage": _object(
        "producers has_more", producers=_array(_ref("Producer")), has_more="boolean"
    ),
}  # fmt: skip


class About(NamedTuple):
    """What an operation is for, and its bodies: schema names, or media types."""

    summary: str
    takes: str = ""
    gives: str = ""
    query: str = ""


_RANGE: Final = "seq_num timestamp tail_offset count bytes until wait clamp"
_LISTING: Final = "prefix start_after limit"
_PAGE: Final = "start_after limit"
_SERIES: Final = "set start end interval"
_POINTS: Final = "offset live cursor"
_MULTIPART: Final = "multipart/mixed"
_BYTES: Final = "application/octet-stream"
_STREAM_PATH: Final = {
    "PUT": About("Create the stream, with its content type.", _BYTES),
    "POST": About("Append messages; close the stream with `Stream-Closed: true`.", _BYTES),
    "GET": About("Read from an offset; `live=long-poll` and `live=sse` follow.", "", _BYTES, _POINTS),
    "HEAD": About("Show the tail, the content type and whether the stream is closed."),
    "DELETE": About("Delete the stream."),
}  # fmt: skip
_SNAPSHOT: Final = {
    "GET": About("Download a snapshot.", "", _BYTES),
    "PUT": About("Publish a snapshot of the state at this position.", _BYTES),
    "DELETE": About("Remove a snapshot."),
}
_PARTS: Final = {
    "POST": About("Store a part of a snapshot that is too large for one request.", _BYTES)
}
_STAGED: Final = {
    "GET": About("List the parts that are not published."),
    "DELETE": About("Discard the parts that are not published."),
}
_SNAPSHOTS: Final = {"GET": About("List snapshots, the newest first.", "", "Snapshots")}
_NEWEST: Final = {"GET": About("Redirect to the newest snapshot.")}
_RETENTION: Final = {
    "PUT": About("Remove the records before this position, which a snapshot covers.")
}
_BOOTSTRAP: Final = {
    "GET": About(
        "Send the newest snapshot and every record after it, in one answer.", "", "multipart/mixed"
    )
}
_TAIL: Final = {"GET": About("Show the position of the next record.", "", "Tail")}
_WORDS: Final[dict[str, dict[str, About]]] = {
    "/v1/streams/{stream}/records": {
        "POST": About("Append records; durable before the answer.", "AppendInput", "AppendAck"),
        "GET": About("Read records; `accept: text/event-stream` follows.", "", "ReadBatch", _RANGE),
    },
    "/v1/streams/{stream}/records/tail": _TAIL,
    "/v1/streams/{stream}/tail": _TAIL,
    "/streams/{stream}/tail": _TAIL,
    "/v1/tails": {"POST": About("Show the tails of up to 1,000 streams.", "TailsInput", "Tails")},
    "/v1/streams": {
        "GET": About("List the streams of a basin.", "", "StreamPage", _LISTING),
        "POST": About("Create a stream.", "CreateStream", "StreamInfo"),
    },
    "/v1/streams/{stream}": {
        "GET": About("Show the configuration of a stream.", "", "StreamConfig"),
        "PUT": About("Create the stream, or give it this configuration.", "StreamConfig", "StreamInfo"),
        "PATCH": About("Change the configuration of a stream.", "StreamConfig", "StreamConfig"),
        "DELETE": About("Delete a stream."),
    },
    "/v1/streams/{stream}/forks": {
        "GET": About("Show what the stream was forked from, and its forks.", "", "ForkPage", _PAGE),
    },
    "/v1/streams/{stream}/producers": {
        "GET": About("List the producers of a stream.", "", "ProducerPage", _PAGE),
    },
    "/v1/streams/{stream}/snapshots": _SNAPSHOTS,
    "/v1/streams/{stream}/snapshot": _NEWEST,
    "/v1/streams/{stream}/snapshot/{position}": _SNAPSHOT,
    "/v1/streams/{stream}/snapshot/{position}/parts": _PARTS,
    "/v1/streams/{stream}/snapshot/parts": _STAGED,
    "/v1/streams/{stream}/retention/{position}": _RETENTION,
    "/v1/streams/{stream}/bootstrap": _BOOTSTRAP,
    "/v1/basins": {
        "GET": About("List basins.", "", "BasinPage", _LISTING),
        "POST": About("Create a basin.", "CreateBasin", "BasinInfo"),
    },
    "/v1/basins/{basin}": {
        "GET": About("Show the configuration of a basin.", "", "BasinConfig"),
        "PUT": About("Create the basin, or give it this configuration.", "EnsureBasin", "BasinInfo"),
        "PATCH": About("Change the configuration of a basin.", "BasinConfig", "BasinConfig"),
        "DELETE": About("Delete a basin and its streams."),
    },
    "/v1/access-tokens": {
        "GET": About("List access tokens.", "", "TokenPage", _LISTING),
        "POST": About("Issue an access token.", "AccessToken", "IssuedToken"),
    },
    "/v1/access-tokens/{token_id}": {"DELETE": About("Revoke an access token.")},
    "/v1/metrics": {"GET": About("Show the usage of the account.", "", "Metrics", _SERIES)},
    "/v1/metrics/{basin}": {"GET": About("Show the usage of a basin.", "", "Metrics", _SERIES)},
    "/v1/metrics/{basin}/{stream}": {
        "GET": About("Show the usage of a stream.", "", "Metrics", _SERIES),
    },
    "/v1/locations": {"GET": About("List locations.", "", "Locations")},
    "/v1/locations/default": {
        "GET": About("Show the default location.", "", "Location"),
        "PUT": About("Set the default location.", "LocationName", "Location"),
    },
    "/{basin}": {
        "PUT": About("Create a bucket, which is a basin."),
        "GET": About("Show a bucket."),
        "HEAD": About("Tell whether a bucket exists."),
    },
    "/{basin}/streams": {"GET": About("List the streams of a bucket.", "", _BYTES)},
    **{
        f"{root}{below}": words
        for root in ("/{basin}/{stream}", "/v1/stream/{stream}")
        for below, words in {
            "": _STREAM_PATH,
            "/snapshot/{position}": _SNAPSHOT,
            "/snapshot/{position}/parts": _PARTS,
            "/snapshot/parts": _STAGED,
            "/snapshots": _SNAPSHOTS,
            "/retention/{position}": _RETENTION,
            "/bootstrap": _BOOTSTRAP,
        }.items()
    },
    "/v1/stream/__ds/jwks.json": {"GET": About("Show the keys that sign webhooks.")},
    "/v1/stream/__ds/subscriptions/{subscription}": {
        "GET": About("Show a subscription.", "", "SubscriptionView"),
        "PUT": About("Create a subscription.", "SubscriptionRequest", "SubscriptionView"),
        "DELETE": About("Delete a subscription."),
    },
    "/v1/stream/__ds/subscriptions/{subscription}/streams": {
        "POST": About("Add streams to a subscription.", "StreamsRequest", "SubscriptionView"),
    },
    "/v1/stream/__ds/subscriptions/{subscription}/streams/{path}": {
        "DELETE": About("Remove a stream from a subscription."),
    },
    "/v1/stream/__ds/subscriptions/{subscription}/claim": {
        "POST": About("Claim work of a subscription.", "ClaimRequest", "ClaimView"),
    },
    "/v1/stream/__ds/subscriptions/{subscription}/ack": {
        "POST": About("Acknowledge offsets.", "AckRequest", "AckView"),
    },
    "/v1/stream/__ds/subscriptions/{subscription}/callback": {
        "POST": About("Acknowledge offsets from a webhook.", "AckRequest", "AckView"),
    },
    "/v1/stream/__ds/subscriptions/{subscription}/release": {
        "POST": About("Give claimed work back.", "ReleaseRequest"),
    },
    **{
        path: {"GET": About(summary), "HEAD": About(summary)}
        for path, summary in {
            "/health": "Tell whether the process runs.",
            "/ping": "Tell whether the process runs.",
            "/ready": "Tell whether the server can serve: storage answers.",
        }.items()
    },
    "/metrics": {"GET": About("Metrics for Prometheus.", "", "text/plain")},
    "/v1/busiest-streams": {
        "GET": About("Show the ten streams with the most appended bytes of late.", "", "Busiest")
    },
    "/v1/damage": {"GET": About("Show what cannot be read because storage is damaged.", "", "Damage")},
}  # fmt: skip
_TITLES: Final = {
    "s2": "The S2 v1 API",
    "durable-streams": "Durable Streams",
    "operations": "Operations",
}
_OPERATIONS: Final = ("/health", "/ping", "/ready", "/metrics", "/v1/busiest-streams", "/v1/damage")
_S2: Final = (
    "/v1/streams", "/v1/tails", "/v1/basins", "/v1/access-tokens", "/v1/metrics", "/v1/locations",
    "/streams/",
)  # fmt: skip


def descriptions(routes: Iterable[Route]) -> dict[str, Schema]:
    """The OpenAPI description of each protocol; raises for a route that is not described above."""
    named = {_unnamed(path): path for path in _WORDS}
    found: dict[str, Schema] = {name: {} for name in _TITLES}
    for route in routes:
        if route.path == "/" or route.path.startswith("/console"):
            continue  # pages for people
        path = named[route.path.replace("{...}", "{}")]
        about = _WORDS[path][route.method]
        paths = found[_protocol(path)]
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, about)
    return {name: _document(_TITLES[name], paths) for name, paths in found.items()}


def _unnamed(path: str) -> str:
    return "/".join("{}" if part.startswith("{") else part for part in path.split("/"))


def _protocol(path: str) -> str:
    if path in _OPERATIONS:
        return "operations"
    return "s2" if path.startswith(_S2) else "durable-streams"


def _operation(route: Route, path: str, about: About) -> Schema:
    parameters: list[Schema] = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in path.split("/")
        if part.startswith("{")
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in about.query.split()
    ]
    if path.startswith(("/v1/streams", "/v1/tails", "/streams")):
        parameters.append(
            {"name": "s2-basin", "in": "header", "required": True, "schema": {"type": "string"}}
        )
    operation: Schema = {
        "summary": about.summary,
        "x-needs": _rule(route),
        "parameters": parameters,
        "responses": {
            "2XX": {"description": "done"} | _content(about.gives),
            "default": {"description": "refused"} | _content("Error"),
        },
    }
    if about.takes:
        operation["requestBody"] = _content(about.takes)
    return operation


def _rule(route: Route) -> str:
    if not isinstance(route.needs, OtherRule):
        return f"`{route.needs.value}`"
    return {
        OtherRule.PUBLIC: "nothing",
        OtherRule.OWNER: "the token of the subscription's owner",
        OtherRule.WAKE_TOKEN: "the token of the wake",
    }[route.needs]


def _content(body: str) -> Schema:
    if not body:
        return {}
    if "/" in body:
        return {"content": {body: {}}}
    return {"content": {"application/json": {"schema": _ref(body)}}}


def _document(title: str, paths: Schema) -> Schema:
    types = list(_TYPES.values())
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    renamed = {kind.__name__: name for name, kind in _TYPES.items()}
    text = msgspec.json.encode({renamed.get(name, name): it for name, it in components.items()})
    for old, new in renamed.items():
        text = text.replace(f'schemas/{old}"'.encode(), f'schemas/{new}"'.encode())
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": streamfold.__version__},
        "paths": paths,
        "components": {"schemas": {**msgspec.json.decode(text), **_WRITTEN}},
    }
