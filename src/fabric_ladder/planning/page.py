"""Write a plan as one HTML page with a stacked bar for each way; it loads nothing and runs no script."""

from html import escape
from string import Template

from fabric_ladder.planning.planner import Plan, recommend
from fabric_ladder.planning.report import TOGETHER, Answer, answer_lines, driver, parts, title
from fabric_ladder.techniques.memory import KINDS

TEMPLATE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .5rem; text-align: left; border-bottom: 1px solid #8884; }
td.number { text-align: right; white-space: nowrap; }
td.wide { width: 45%; }
tr.no { opacity: .55; }
.bar { position: relative; height: 1.1rem; display: flex; overflow-x: clip; }
.bar i { flex: none; height: 100%; }
.key { display: inline-block; width: .9rem; height: .9rem; margin: 0 .3rem 0 1rem; }
.bar b { position: absolute; top: -.25rem; bottom: -.25rem; border-left: 2px solid currentColor; }
.weights { background: #3b6fb6; } .gradients { background: #d98a29; } .optimizer { background: #4f9d69; }
.activations { background: #b5485d; } .other { background: #8568b0; } .own { background: #8a8a8a; }
</style>
<h1>$title</h1>
<pre>$answer</pre>
<p>$legend The line is the memory that the GPU may use. GB are 10<sup>9</sup> bytes at one GPU's peak, predicted.</p>
<table><thead><tr><th>way<th>micro-batch<th>memory<th>GB<th>low to high<th>CPU memory<th>fits</tr></thead>
<tbody>
$rows
</tbody></table>
</html>
""")


def to_page(answer: Answer) -> str:
    """Return the page."""
    memory = answer.machine.room
    scale = max(memory, *(min(plan.high, 2 * memory) for plan in answer.plans))
    best = recommend(answer.plans).values()
    kinds = {KINDS[kind].name: KINDS[kind].name for kind in TOGETHER} | {"own": f"{driver(answer)}'s own"}
    kinds["activations"] += f" and {KINDS['logits'].name}"
    legend = "".join(f'<span class="key {kind}"></span>{name}' for kind, name in kinds.items())
    return TEMPLATE.substitute(
        title=escape(title(answer)),
        answer=escape("\n".join(answer_lines(answer))),
        legend=f"{legend}.",
        rows="\n".join(_row(plan, kinds, memory, scale, plan in best) for plan in answer.plans),
    )


def _row(plan: Plan, kinds: dict[str, str], memory: int, scale: int, recommended: bool) -> str:
    sizes = (*parts(plan.peak), plan.needed - plan.peak.total)
    bar = "".join(
        f'<i class="{kind}" style="width:{100 * size / scale:.2f}%" title="{name} {size / 1e9:.2f} GB"></i>'
        for (kind, name), size in zip(kinds.items(), sizes, strict=True)
    )
    name = escape(plan.candidate.name)
    line = f'<b style="left:{100 * memory / scale:.2f}%"></b>'
    cells = (
        f"<td>{f'<strong>{name}</strong>' if recommended else name}",
        f'<td class="number">{plan.micro_batch or "set"}',
        f'<td class="wide"><div class="bar">{bar}{line}</div>',
        f'<td class="number">{plan.needed / 1e9:.2f}',
        f'<td class="number">{plan.low / 1e9:.1f} to {plan.high / 1e9:.1f}',
        f'<td class="number">{plan.host / 1e9:.0f}',
        f"<td>{'yes' if plan.fits else 'no'}",
    )
    return f'<tr class="{"yes" if plan.fits else "no"}">{"".join(cells)}</tr>'
