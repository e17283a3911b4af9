"""Chat templates that never end, or want all memory."""

_LOOP, _END = "{% for x in range(99999) %}", "{% endfor %}"
_LONG = "{% set n = namespace(s='a') %}{% for i in range(40) %}"

ENDLESS: dict[str, str] = {
    "loops in loops": _LOOP * 4 + _END * 4,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "many slices": "{% for x in range(9)|slice(100000000) %}{% endfor %}",
    "long lines that are broken": "{{ ('a ' * 8000000)|wordwrap(1) }}",
    "a number that is squared": "{% set n = namespace(i=2) %}{% for i in range(60) %}"
    "{% set n.i = n.i * n.i %}{% endfor %}{{ n.i }}",
}
"""They take more than a second."""

GREEDY: dict[str, str] = {
    "a text that is doubled": _LONG + "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s|length }}",
    "a wide number": "{{ '%099999999999d'|format(1) }}",
    "a wide field": "{{ '{:>9999999999}'.format(1) }}",
    "lines that are indented far": "{{ ('a\n' * 100000)|indent(1000000) }}",
    "zeros before a text": "{{ 'a'.zfill(4000000000) }}",
    "JSON that is indented far": "{{ [1, [2]]|tojson(indent=2000000000) }}",
    "a text in the middle of nothing": "{{ 'a'|center(4000000000) }}",
    "a text for every character": "{{ ('a' * 9999999).replace('a', 'a' * 9999999) }}",
    "batches that are filled up": "{{ range(10)|batch(10 ** 9, 1)|list }}",
}
"""They take more than half a gigabyte."""

FAILING: dict[str, str] = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "words of nobody": "{{ lipsum(n=100000) }}",
    "a cycler": "{{ cycler('a') }}",
}
