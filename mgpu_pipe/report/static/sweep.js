// Pictures of a sweep: its runs across all parameters, its metric against each of them; and the table's filter.
const EDGE = {left: 62, right: 16, top: 24, bottom: 40}, REACH = 14;
let pointed = -1;  // the run under the pointer, as its place in page.runs
const words = () => KEPT.filter.split(/\s+/).filter(Boolean);

// Whether a row has a word of the filter: somewhere in it, or in the column that the word compares.
function matches(row, word) {
  const [, name, sign, wanted] = word.match(/^(.+?)(<=|>=|=|<|>)(.*)$/) ?? [];
  const cell = name && [...row.cells].find(cell => cell.dataset.name === name || cell.dataset.name.endsWith('.' + name) || cell.dataset.name.endsWith('/' + name));
  if (!cell) return row.textContent.toLowerCase().includes(word.toLowerCase());
  const value = cell.dataset.sort, both = value !== '' && wanted !== '' && !isNaN(value) && !isNaN(wanted);
  if (sign === '=') return both ? Number(value) === Number(wanted) : value === wanted;
  return both && (sign.startsWith('<') ? value - wanted < 0 : value - wanted > 0) || sign.length > 1 && both && value - wanted === 0;
}
function filterRuns() {
  const place = new Map(page.runs.map((number, at) => [String(number), at])), asked = words();
  KEPT.out = new Set();
  let shown = 0;
  for (const row of document.querySelector('table.runs').tBodies[0].rows) {
    row.hidden = !asked.every(word => matches(row, word));
    if (row.hidden) KEPT.out.add(place.get(row.cells[0].dataset.sort)); else shown++;
  }
  document.getElementById('match-count').textContent = asked.length ? `${shown} of ${page.runs.length} runs` : '';
}

// Strong for good runs, faint for bad ones; grey for what reached nothing.
function shade(at, css) {
  const value = page.shades[at], get = name => css.getPropertyValue(name);
  if (at === pointed) return get('--text');
  if (value === null) return get('--line');
  return value === 1 ? get('--k1') : `color-mix(in oklab, ${get('--k0')} ${Math.round(100 * value)}%, ${get('--faint')})`;
}
const drawnRuns = () => [...page.runs.keys()].filter(at => !KEPT.out.has(at))
  .sort((a, b) => (a === pointed) - (b === pointed) || (page.shades[a] ?? -1) - (page.shades[b] ?? -1));

function picture(canvas) {
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1, css = style();
  Object.assign(canvas, {width: width * ratio, height: height * ratio});
  const c = canvas.getContext('2d');
  c.scale(ratio, ratio);
  c.font = '12px system-ui, sans-serif';
  c.lineJoin = 'round';
  (canvas.dataset.x === undefined ? parallel : scatter)(canvas, c, {width, height}, css);
}
const fitted = (c, text, room) => {
  if (c.measureText(text).width <= room) return text;
  let kept = text.length;
  while (kept > 3 && c.measureText('…' + text.slice(-kept)).width > room) kept--;
  return '…' + text.slice(-kept);  // the end of a key tells it from the others
};
const upwards = ({height}, place) => height - EDGE.bottom - place * (height - EDGE.bottom - EDGE.top);

function parallel(canvas, c, size, css) {
  const axes = page.pictures, step = (size.width - EDGE.left - EDGE.right - 30) / Math.max(1, axes.length - 1);
  const x = at => EDGE.left + at * step;
  canvas.at = [];
  for (const run of drawnRuns()) {
    const line = axes.map((axis, at) => axis.places[run] === null ? null : [x(at), upwards(size, axis.places[run])]);
    canvas.at.push([run, line.filter(Boolean)]);
    c.beginPath();
    line.forEach((to, at) => { if (to) c[at && line[at - 1] ? 'lineTo' : 'moveTo'](...to); });
    c.strokeStyle = shade(run, css);
    c.lineWidth = run === pointed || page.shades[run] === 1 ? 2.5 : 1;
    c.stroke();
  }
  axes.forEach((axis, at) => {
    c.strokeStyle = css.getPropertyValue('--soft');
    c.lineWidth = 1;
    c.strokeRect(x(at), EDGE.top, 0, size.height - EDGE.bottom - EDGE.top);
    c.fillStyle = css.getPropertyValue('--text');
    const last = at && at === axes.length - 1;
    c.textAlign = last ? 'right' : at ? 'center' : 'left';
    c.fillText(fitted(c, axis.name, step - 8), last ? size.width - 4 : at ? x(at) : 4, size.height - (at % 2 ? 6 : 22));
    ticks(c, css, axis, (text, place) => [x(at) - 5, upwards(size, place) + 4, 'right', step - 14]);
  });
}
function ticks(c, css, axis, where) {
  for (const [text, place] of axis.ticks) {
    const [x, y, align, room] = where(text, place);
    c.textAlign = align;
    const shown = fitted(c, text, room), width = c.measureText(shown).width;
    c.fillStyle = css.getPropertyValue('--card');
    c.globalAlpha = 0.75;
    c.fillRect(align === 'right' ? x - width - 2 : x - width / 2 - 2, y - 11, width + 4, 15);
    c.globalAlpha = 1;
    c.fillStyle = css.getPropertyValue('--soft');
    c.fillText(shown, x, y);
  }
}

function scatter(canvas, c, size, css) {
  const across = page.pictures[canvas.dataset.x], up = page.pictures[canvas.dataset.y];
  const inner = size.width - EDGE.left - EDGE.right - 20, x = place => EDGE.left + 10 + place * inner;
  for (const [, place] of up.ticks) {
    c.fillStyle = css.getPropertyValue('--grid');
    c.fillRect(EDGE.left, upwards(size, place), size.width - EDGE.left - EDGE.right, 1);
  }
  ticks(c, css, up, (text, place) => [EDGE.left - 6, upwards(size, place) + 4, 'right', EDGE.left - 8]);
  ticks(c, css, across, (text, place) => [x(place), size.height - 22, 'center', inner / across.ticks.length]);
  c.fillStyle = css.getPropertyValue('--text');
  c.textAlign = 'right';
  c.fillText(across.name, size.width - EDGE.right, size.height - 5);
  c.textAlign = 'left';
  c.fillText(up.name, 4, 11);
  const spot = run => across.places[run] === null || up.places[run] === null ? null
    : [x(across.places[run]), upwards(size, up.places[run])];
  if (canvas.dataset.front !== undefined) {
    const line = page.front.map(spot).filter(Boolean).sort((a, b) => a[0] - b[0]);
    c.beginPath();
    line.forEach((to, at) => c[at ? 'lineTo' : 'moveTo'](...to));
    c.strokeStyle = css.getPropertyValue('--k1');
    c.stroke();
  }
  canvas.at = [];
  for (const run of drawnRuns()) {
    const to = spot(run);
    if (!to) continue;
    canvas.at.push([run, [to]]);
    c.beginPath();
    c.arc(...to, run === pointed || page.shades[run] === 1 ? 5 : 3.5, 0, 7);
    c.fillStyle = shade(run, css);
    c.fill();
  }
}

// The run nearest to the pointer is drawn strongly in every picture, and a tip shows its row of the table.
function point(canvas, event) {
  const box = canvas?.getBoundingClientRect();
  let run = -1, least = REACH;
  for (const [at, line] of canvas?.at ?? []) for (const [x, y] of line) {
    const apart = Math.hypot(event.clientX - box.x - x, event.clientY - box.y - y);
    if (apart < least) [run, least] = [at, apart];
  }
  if (run !== pointed) { pointed = run; all('canvas.picture').forEach(picture); }
  let tip = document.querySelector('main > .tip');
  if (!tip) document.querySelector('main').append(tip = make('div', 'tip fixed'));
  tip.style.display = run < 0 ? 'none' : 'block';
  if (run < 0) return;
  const row = all('table.runs tbody tr').find(row => row.cells[0].dataset.sort === String(page.runs[run]));
  tip.replaceChildren(...[...row.cells].filter(cell => cell.dataset.sort !== '').map(cell => {
    const line = make('div', '');
    line.append(make('span', '', cell.dataset.name), make('span', 'value', cell.textContent.trim()));
    return line;
  }));
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + 'px';
}

let watching = null;
function startSweep() {
  const field = document.getElementById('filter');
  field.value = KEPT.filter;
  filterRuns();
  watching?.disconnect();
  watching = new ResizeObserver(entries => entries.forEach(entry => picture(entry.target)));
  all('canvas.picture').forEach(canvas => watching.observe(canvas));
}
document.addEventListener('input', event => {
  if (event.target.id !== 'filter') return;
  KEPT.filter = event.target.value;
  filterRuns();
  all('canvas.picture').forEach(picture);
  switchCurves();
});
document.addEventListener('pointermove', event => {
  const canvas = event.target.closest?.('canvas.picture');
  if (canvas || pointed >= 0) point(canvas, event);
});
KEPT.filter = '';
STARTS.push(startSweep);
shadeOf = shade;
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => all('canvas.picture').forEach(picture));
