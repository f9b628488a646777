"""Bar chart of throughput by workload and system, as SVG.

Each workload has a scale of its own, on which the hardware's floor is 100 %: batches of 1 and of 32 differ twentyfold.
The figures on the bars are tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

COLOURS = ("#d1495b", "#e9a03b", "#2f6690", "#81a4cd", "#7a8b69", "#9c89b8", "#5c5c5c", "#c9ada7")
BAR, GAP, HEIGHT, LEFT, TOP = 18, 22, 260, 46, 62
TICKS = 5
FONT = 'font-family="system-ui, sans-serif"'


def svg(
    title: str,
    workloads: Sequence[str],
    figures: Mapping[str, Mapping[str, float]],  # system -> workload -> tokens per second
    floor: Mapping[str, float],  # empty: the fastest system is 100 %
) -> str:
    """The whole file."""
    colours = {system: COLOURS[number % len(COLOURS)] for number, system in enumerate(figures)}
    whole = {name: floor.get(name) or max(by.get(name, 0.0) for by in figures.values()) for name in workloads}
    # Noise, or a floor measured on a busy machine, can put a system above it: then there must be room.
    scale = HEIGHT / max([1.0, *(by[name] / whole[name] for by in figures.values() for name in by)])
    groups: list[str] = []
    x = LEFT + GAP / 2
    for name in workloads:
        bars = [(system, by[name]) for system, by in figures.items() if name in by]
        groups += _group(x, name, bars, scale / whole[name], colours)
        x += BAR * len(bars) + GAP
    width, bottom = x, TOP + HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 40}" '
            f'viewBox="0 0 {width:.0f} {bottom + 40}" role="img">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            _text(LEFT, 18, title, size=13, weight="bold"),
            *_axis(width, scale),
            *groups,
            *([_line(LEFT, bottom - scale, width, bottom - scale, "#111", "5 3")] if floor else []),
            *_legend(colours, bool(floor)),
            "</svg>",
            "",
        ]
    )


def _axis(width: float, scale: float) -> Iterator[str]:
    for tick in range(TICKS + 1):
        y = TOP + HEIGHT - scale * tick / TICKS
        yield _line(LEFT, y, width, y, "#ddd")
        yield _text(LEFT - 6, y + 4, f"{100 * tick // TICKS} %", anchor="end")


def _group(
    x: float, name: str, bars: Sequence[tuple[str, float]], scale: float, colours: Mapping[str, str]
) -> Iterator[str]:
    """The bars of one workload."""
    for number, (system, value) in enumerate(bars):
        height = value * scale
        left, top = x + number * BAR, TOP + HEIGHT - height
        yield (
            f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{BAR - 2}" height="{height:.1f}" fill="{colours[system]}">'
            f"<title>{escape(system)}, {escape(name)}: {value:.1f} tokens/s</title></rect>"
        )
        # Upright in the bar where it has room, above it otherwise.
        is_inside = height > 40
        y = top + 4 if is_inside else top - 4
        yield _text(
            left + BAR / 2 + 4,
            y,
            f"{value:.0f}",
            anchor="end" if is_inside else "start",
            fill="white" if is_inside else "#111",
            turn=True,
        )
    yield _text(x + BAR * len(bars) / 2, TOP + HEIGHT + 18, name, anchor="middle")


def _legend(colours: Mapping[str, str], has_floor: bool) -> Iterator[str]:
    x = float(LEFT)
    for system, colour in colours.items():
        yield f'<rect x="{x:.0f}" y="30" width="11" height="11" fill="{colour}"/>'
        yield _text(x + 15, 40, system)
        x += 30 + 6.2 * len(system)
    if has_floor:
        yield _line(x, 36, x + 18, 36, "#111", "5 3")
        yield _text(x + 22, 40, "floor of the hardware")


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 11,
    fill: str = "#111",
    weight: str = "normal",
    turn: bool = False,
) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}" {FONT}{turned}>{escape(text)}</text>'
    )
