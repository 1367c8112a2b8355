"""Formats as patterns: one definition both for the masks and for the final check.

Sources: RFC 3339 (dates, times, durations by ISO 8601), RFC 5321 and 6531 (mail), RFC 1123 (host names),
RFC 2673 and 4291 (addresses), RFC 3986, 3987 and 6570 (URIs, IRIs, templates), RFC 6901 (pointers), RFC 4122.
Where a grammar holds more than a regular language can (UTF-8 lengths, bidirectional names), the pattern is
the part that everyone agrees on. All of it is printable ASCII but for the international formats.
"""

from __future__ import annotations

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_OFFSET = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# A leap second is at 23:59:60 UTC; with another offset it would need arithmetic.
_TIME = rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = rf"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK})?"
_DURATION = rf"P(?:{_DAYS}|{_CLOCK}|[0-9]+W)"

_LABEL = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_ATEXT = r"[a-zA-Z0-9!\#$%\&'*+/=?^_`{|}\~-]"
_LOCAL = rf"(?:{_ATEXT}+(?:\.{_ATEXT}+)*)"
_EMAIL = rf"{_LOCAL}@(?:{_HOSTNAME}|\[{_IPV4}\])"


def _ipv6() -> str:
    group = r"[0-9a-fA-F]{1,4}"
    last = rf"(?:{group}:{group}|{_IPV4})"
    forms = [rf"(?:{group}:){{6}}{last}"]
    for before in range(6):  # "::" stands for at least one group of eight; two of them are in ``last``
        after = 5 - before
        head = (
            rf"(?:(?:{group}:){{0,{before - 1}}}{group})?"
            if before > 1
            else rf"(?:{group})?"
            if before
            else ""
        )
        forms.append(rf"{head}::(?:{group}:){{{after}}}{last}")
    forms.append(rf"(?:(?:{group}:){{0,5}}{group})?::{group}")
    forms.append(rf"(?:(?:{group}:){{0,6}}{group})?::")
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()
_HEX = r"%[0-9a-fA-F]{2}"


def _uri(other: str) -> dict[str, str]:
    """RFC 3986, and RFC 3987 with the characters that it adds to the unreserved ones."""
    char = rf"(?:[a-zA-Z0-9._\~!$\&'()*+,;=:@{other}-]|{_HEX})"
    no_colon = rf"(?:[a-zA-Z0-9._\~!$\&'()*+,;=@{other}-]|{_HEX})"
    userinfo = rf"(?:[a-zA-Z0-9._\~!$\&'()*+,;=:{other}-]|{_HEX})*"
    name = rf"(?:[a-zA-Z0-9._\~!$\&'()*+,;={other}-]|{_HEX})*"
    future = r"v[0-9a-fA-F]+\.[a-zA-Z0-9._\~!$\&'()*+,;=:-]+"
    host = rf"(?:\[(?:{_IPV6}|{future})\]|{name})"
    authority = rf"(?:{userinfo}@)?{host}(?::[0-9]*)?"
    rooted = rf"/(?:{char}+(?:/{char}*)*)?"
    hierarchy = rf"(?://{authority}(?:/{char}*)*|{rooted}|{char}+(?:/{char}*)*|)"
    relative = rf"(?://{authority}(?:/{char}*)*|{rooted}|{no_colon}+(?:/{char}*)*|)"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:\#(?:{char}|[/?])*)?"
    absolute = rf"[a-zA-Z][a-zA-Z0-9+.-]*:{hierarchy}{tail}"
    return {"absolute": absolute, "reference": rf"(?:{absolute}|{relative}{tail})"}


_INTERNATIONAL = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000dfffd"
_URI, _IRI = _uri(""), _uri(_INTERNATIONAL)
_VARIABLE = rf"(?:[a-zA-Z0-9_]|{_HEX})(?:\.?(?:[a-zA-Z0-9_]|{_HEX}))*(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[!\#$\&()*+,./0-9:;=?@A-Z\[\]_a-z\~{_INTERNATIONAL}-]|{_HEX}"
    rf"|\{{[+\#./;?\&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_POINTER = r"(?:/(?:[^/\~]|\~[01])*)*"

_BODIES = {
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "date": _DATE,
    "full-date": _DATE,
    "time": _TIME,
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI["absolute"],
    "url": _URI["absolute"],
    "uri-reference": _URI["reference"],
    "iri": _IRI["absolute"],
    "iri-reference": _IRI["reference"],
    "uri-template": _TEMPLATE,
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\#|{_POINTER})",
}
_LONGEST = {"hostname": 253, "email": 254}

# Names of numeric formats and of hints for a user interface: they say nothing about a string.
HINTS = frozenset({"int32", "int64", "float", "double", "password", "binary"})


def format_schema(name: str) -> dict[str, object] | None:
    """A schema for the strings of a format; None for an unknown one."""
    body = _BODIES.get(name)
    if body is None:
        return None
    schema: dict[str, object] = {"pattern": rf"^(?:{body})\Z"}
    if name in _LONGEST:
        schema["maxLength"] = _LONGEST[name]
    return schema
