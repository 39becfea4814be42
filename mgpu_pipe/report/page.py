"""The report's page: template, style and the script that shows values under the pointer.

Strings in a module, so that every wheel carries them. Nothing refers to anything outside the file; the page's
content security policy allows no request at all, and of scripts only the one whose hash it names.
"""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --line: #e3e6eb; --text: #171a1f; --soft: #5a6472; --grid: #e9ecf0;
  --link: #0b62c4; --good: #0f7a4d; --good-back: #dff5ea; --bad: #b3261e; --bad-back: #fde7e5;
  --wait: #8a5a00; --wait-back: #fdf0d5; --code: #f0f2f5;
  --k0: #1668c9; --k1: #cf5a00; --k2: #0b8560; --k3: #8b45c6; --k4: #b3861a; --k5: #c43a6b; --k6: #3a8fb0;
  --k7: #5d6773; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f1216; --card: #181c22; --line: #2a3038; --text: #e8ebef; --soft: #9aa5b3; --grid: #262c34;
  --link: #74b3ff; --good: #5fdca0; --good-back: #11362a; --bad: #ff9b92; --bad-back: #45201d;
  --wait: #f5c56b; --wait-back: #3d2f12; --code: #20262e;
  --k0: #62a8ff; --k1: #ff9b4d; --k2: #3fd3a0; --k3: #c596f7; --k4: #e8c557; --k5: #ff85ad; --k6: #79cbe6;
  --k7: #aeb8c4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; letter-spacing: -.01em; }
h3 { font-size: 14px; margin: 0 0 8px; }
h4 { font-size: 13px; margin: 14px 0 4px; color: var(--soft); font-weight: 600; }
p { margin: 0; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  font-size: 12.5px; }
.head { display: flex; flex-wrap: wrap; gap: 10px 12px; align-items: center; }
.pill { font-size: 13px; font-weight: 600; padding: 2px 11px; border-radius: 99px; background: var(--wait-back);
  color: var(--wait); white-space: nowrap; }
.pill.finished { background: var(--good-back); color: var(--good); }
.pill.failed { background: var(--bad-back); color: var(--bad); }
.sub { color: var(--soft); margin-top: 6px; overflow-wrap: anywhere; }
.note { margin-top: 16px; padding: 12px 16px; border-radius: 10px; background: var(--wait-back); color: var(--wait);
  white-space: pre-wrap; overflow-wrap: anywhere; }
.note.bad { background: var(--bad-back); color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px; margin-top: 22px; }
.card, .chart { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 14px 16px; min-width: 0; }
.figures .card b { display: block; font-size: 23px; line-height: 1.25; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures .card span { color: var(--soft); font-size: 13px; display: block; }
.figures .main { grid-column: span 2; border-color: var(--k0); box-shadow: inset 0 0 0 1px var(--k0); }
.equation { font-size: 14px; margin-bottom: 8px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.chart { margin: 0; padding: 14px 16px 10px; min-width: 0; }
.chart.wide { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; margin-bottom: 10px; }
.title { font-weight: 620; } .unit { color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-left: auto; font-size: 13px; color: var(--soft); }
.key { display: inline-flex; align-items: center; gap: 6px; overflow-wrap: anywhere; }
.swatch { width: 16px; height: 3px; border-radius: 2px; background: currentColor; flex: none; }
.swatch.dots { width: 9px; height: 9px; border-radius: 50%; }
.frame { display: grid; grid-template-columns: 44px minmax(0, 1fr); grid-template-rows: 190px 22px; }
.wide .frame { grid-template-rows: 300px 22px; }
.plot { position: relative; touch-action: pan-y; cursor: crosshair; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; display: block; }
.plot polyline, .plot path { fill: none; stroke: currentColor; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; }
.plot polyline { stroke-width: 2; } .plot .raw { stroke-width: 1; opacity: .38; }
.plot .dots { stroke-width: 1.5; stroke-dasharray: 4 3; } .plot .mark { stroke-width: 7; stroke-linecap: round; }
.plot .grid { color: var(--grid); stroke-width: 1; }
.plot .dash1 { stroke-dasharray: 7 4; } .plot .dash2 { stroke-dasharray: 2 3; }
.k0 { color: var(--k0); } .k1 { color: var(--k1); } .k2 { color: var(--k2); } .k3 { color: var(--k3); }
.k4 { color: var(--k4); } .k5 { color: var(--k5); } .k6 { color: var(--k6); } .k7 { color: var(--k7); }
.x, .y { position: relative; font-size: 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
.x { grid-column: 2; }
.y span { position: absolute; right: 8px; transform: translateY(50%); line-height: 1; white-space: nowrap; }
.x span { position: absolute; top: 6px; transform: translateX(-50%); line-height: 1; white-space: nowrap; }
.level { position: absolute; left: 0; right: 0; border-top: 1.5px dashed var(--soft); pointer-events: none; }
.level span { position: absolute; right: 4px; bottom: 2px; font-size: 12px; color: var(--soft);
  background: var(--card); padding: 0 4px; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); display: none;
  pointer-events: none; }
.tip { position: absolute; top: 6px; display: none; pointer-events: none; z-index: 2; padding: 6px 10px;
  font-size: 12.5px; line-height: 1.45;
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; box-shadow: 0 4px 14px rgb(0 0 0 / .16);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip { max-width: 100%; overflow: hidden; }
.tip div { display: flex; align-items: center; gap: 6px; } .tip .value { margin-left: auto; padding-left: 10px;
  font-weight: 600; }
.empty { height: 120px; display: grid; place-items: center; color: var(--soft); }
.tables { columns: 2; column-gap: 14px; }
.tables .card { break-inside: avoid; margin-bottom: 14px; }
dl { display: grid; grid-template-columns: minmax(96px, 36%) minmax(0, 1fr); gap: 3px 14px; margin: 0;
  font-size: 14px; }
dt { color: var(--soft); overflow-wrap: anywhere; } dd { margin: 0; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
ul.plain { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 6px; }
ul.plain code { background: var(--code); border-radius: 6px; padding: 2px 8px; display: block;
  overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; white-space: nowrap; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } th.n, td.n { text-align: right; white-space: nowrap; }
td.long { min-width: 190px; overflow-wrap: anywhere; } td.best { font-weight: 700; }
.samples { display: grid; gap: 12px; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; line-height: 1.6; margin: 0;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.sample mark { background: none; color: var(--k0); font-weight: 600; }
details { margin-top: 14px; } summary { cursor: pointer; font-weight: 600; font-size: 14px; }
details pre { margin: 10px 0 0; overflow-x: auto; line-height: 1.5; }
footer { margin-top: 40px; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
@media (max-width: 760px) {
  main { padding: 20px 14px 36px; } h1 { font-size: 22px; }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; } .figures .card { padding: 11px 13px; }
  .figures .card b { font-size: 20px; } .charts { grid-template-columns: minmax(0, 1fr); } .tables { columns: 1; }
  .chart { padding: 12px 12px 8px; } .frame { grid-template-columns: 38px minmax(0, 1fr); }
  .wide .frame { grid-template-rows: 230px 22px; } .legend { margin-left: 0; width: 100%; }
}
@media print { main { max-width: none; padding: 0; } .card, .chart { break-inside: avoid; } }
"""

SCRIPT = """
for (const plot of document.querySelectorAll('.plot')) {
  const [x0, x1] = plot.dataset.x.split(' ').map(Number), [y0, y1] = plot.dataset.y.split(' ').map(Number);
  const log = plot.dataset.log === '1', cursor = plot.querySelector('.cursor'), tip = plot.querySelector('.tip');
  let curves = null;
  const value = v => log ? y0 * Math.pow(y1 / y0, v) : y0 + (y1 - y0) * v;
  const read = () => [...plot.querySelectorAll('polyline')].map(line => ({
    label: line.dataset.label, color: line.classList[0],
    points: line.getAttribute('points').split(' ').map(pair => pair.split(',').map(Number)) }));
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return x - points[low][0] < points[high][0] - x ? points[low] : points[high];
  };
  const row = (color, label, text) => {
    const line = document.createElement('div');
    if (color) {
      const swatch = document.createElement('i');
      swatch.className = 'swatch ' + color;
      line.append(swatch);
    }
    const shown = document.createElement('span');
    shown.className = 'value';
    shown.textContent = text;
    line.append(label, shown); return line;
  };
  const short = number => Math.abs(number) >= 1e5
    ? Math.round(number).toLocaleString('en') : Number(number.toPrecision(4)).toString();
  const show = event => {
    curves = curves || read();
    const box = plot.getBoundingClientRect();
    const at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const anchor = curves.map(c => nearest(c.points, at * 10000)[0])
      .reduce((a, b) => Math.abs(a - at * 10000) <= Math.abs(b - at * 10000) ? a : b);
    const near = curves.map(c => [c, nearest(c.points, anchor)]).filter(([c, p]) => Math.abs(p[0] - anchor) < 60);
    tip.replaceChildren(row('', 'step', Math.round(x0 + (x1 - x0) * anchor / 10000).toLocaleString('en')),
      ...near.map(([c, p]) => row(c.color, c.label, short(value(1 - p[1] / 10000)))));
    cursor.style.left = anchor / 100 + '%';
    cursor.style.display = tip.style.display = 'block';
    const left = anchor / 10000 * box.width, beside = left > box.width / 2 ? left - tip.offsetWidth - 10 : left + 10;
    tip.style.left = Math.max(0, Math.min(beside, box.width - tip.offsetWidth)) + 'px';
  };
  const hide = () => { cursor.style.display = tip.style.display = 'none'; };
  plot.addEventListener('pointermove', show);
  plot.addEventListener('pointerdown', show);
  plot.addEventListener('pointerleave', hide);
}
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src '{{ script_hash }}'">
<meta name="referrer" content="no-referrer">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
<div class="head"><h1>{{ heading }}</h1>
{% if status %}<span class="pill {{ status }}">{{ status }}</span>{% endif %}</div>
{% for line in subtitle %}<p class="sub">{{ line }}</p>
{% endfor %}
{% if error %}<div class="note bad" role="alert">{{ error }}</div>{% endif %}
{% for problem in problems %}<div class="note">{{ problem }}</div>{% endfor %}
</header>
{% if figures %}<section class="figures" aria-label="Key figures">
{% for item in figures %}<div class="card{{ ' main' if loop.first }}">
<span>{{ item.label }}</span><b>{{ item.value }}</b><span>{{ item.note }}</span></div>
{% endfor %}</section>{% endif %}
{% if comparison %}<h2>Runs</h2>
<div class="card scroll"><table>
<thead><tr>{% for column in comparison.columns %}
<th{% if column.numeric %} class="n"{% endif %} scope="col">{{ column.title }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in comparison.rows %}<tr>{% for cell in row %}<td class="{{ cell.style }}">
{% if cell.color is none %}{{ cell.text }}{% else %}
<span class="key"><i class="swatch k{{ cell.color }}"></i>{{ cell.text }}</span>{% endif %}
</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
<h2>Training</h2>
<section class="charts">
{% for chart in charts %}{{ chart }}
{% endfor %}</section>
{% if samples %}<h2>Samples</h2>
<section class="samples">
{% for sample in samples %}<div class="card">{% if sample.title %}<h3>{{ sample.title }}</h3>{% endif %}
<p class="sample"><mark>{{ sample.prompt }}</mark>{{ sample.text }}</p></div>
{% endfor %}</section>{% endif %}
{% if blocks %}<h2>Details</h2>
<section class="tables">
{% for block in blocks %}<div class="card"><h3>{{ block.title }}</h3>
{% if block.text %}<p class="equation">{{ block.text }}</p>{% endif %}
{% if block.code %}<ul class="plain">
{% for item in block.code %}<li><code>{{ item }}</code></li>{% endfor %}</ul>{% endif %}
{% for part in block.parts %}{% if part.title %}<h4>{{ part.title }}</h4>{% endif %}
<dl>{% for key, value in part.rows %}<dt>{{ key }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% endfor %}
{% if block.table %}<div class="scroll"><table>
<thead><tr>{% for name in block.table.names %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in block.table.rows %}<tr>
{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table></div>{% endif %}
</div>
{% endfor %}</section>{% endif %}
{% for config in configs %}<details class="card"><summary>{{ config.title }}</summary>
<pre>{{ config.text }}</pre></details>
{% endfor %}
<footer>{{ footer }}</footer>
</main>
<script>{{ script }}</script>
</body>
</html>
"""
