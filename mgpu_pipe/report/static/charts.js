'use strict';
// Draws the page's charts with uPlot: one x axis and one zoom for all of them, legends that switch curves.
const DASHES = [[], [9, 4], [2, 4], [10, 4, 2, 4], [5, 2]];
const KEPT = {axis: 0, zoom: null, sort: null, off: new Set(), log: new Map(), out: new Set(), even: true};  // what the reader chose; a refresh keeps it
const style = () => getComputedStyle(document.documentElement);
const make = (tag, name, text = '') => Object.assign(document.createElement(tag), {className: name, textContent: text});
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const colour = (curve, css) => shadeOf ? shadeOf(curve.run, css) : css.getPropertyValue(curve.style === 'level' ? '--soft' : `--k${curve.number % 8}`);
const dashes = curve => shadeOf ? [] : curve.style === 'dots' ? [4, 3] : curve.style === 'level' ? [3, 3]
  : DASHES[curve.number % DASHES.length];
const WHOLE = Array.from({length: 12}, (_, at) => [1, 2, 5].map(size => size * 10 ** at)).flat();  // between two steps is none
const STARTS = [];  // what else a page does when it is shown
let page = null, plots = [], shadeOf = null;

const compact = new Intl.NumberFormat('en', {notation: 'compact', maximumSignificantDigits: 4});
function short(value) {
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e4) return compact.format(value);
  return size < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, 'e') : String(Number(value.toPrecision(4)));
}
const whole = (value, at) => at === 0 ? Math.round(value).toLocaleString('en') : short(value);

// First index whose value is at least `value`.
function bisect(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}
function nearest(values, value) {
  const at = Math.min(bisect(values, value), values.length - 1);
  return at > 0 && value - values[at - 1] < values[at] - value ? at - 1 : at;
}
// A run's step on an axis: 0 steps, 1 tokens, 2 time; between the points of its clock along a straight line.
function onAxis(run, axis, step) {
  const clock = page.clocks[run];
  if (axis === 0) return step;
  const at = Math.min(Math.max(bisect(clock[0], step), 1), clock[0].length - 1);
  const share = (step - clock[0][at - 1]) / (clock[0][at] - clock[0][at - 1]);
  return clock[axis][at - 1] + share * (clock[axis][at] - clock[axis][at - 1]);
}
const hidden = curve => KEPT.out.has(curve.run) || curve.style === 'raw' && KEPT.off.has('raw')
  || curve.style !== 'raw' && curve.keys.length > 0 && curve.keys.every(key => KEPT.off.has(key));

function extent(zoom = KEPT.zoom) {
  if (zoom) return zoom;
  let low = Infinity, high = -Infinity;
  for (const {curves} of plots) for (const curve of curves) {
    low = Math.min(low, curve.across[0]); high = Math.max(high, curve.across[curve.across.length - 1]);
  }
  return [low <= 0.05 * high ? 0 : low, high > low ? high : low + 1];
}
function zoomTo(low, high) {
  const [start, end] = extent(null);
  if (high - low < Math.max((end - start) / 1e5, Math.abs(end) / 1e9)) return;  // closer than ticks can tell apart
  KEPT.zoom = low === null ? null : [low, high];
  const [first, last] = extent();
  for (const {u} of plots) u.setScale('x', {min: first, max: last});
  for (const button of all('.reset')) button.hidden = !KEPT.zoom;
}

function draw() {
  for (const {u, watch} of plots) { watch.disconnect(); u.destroy(); }
  plots = all('.plot').map(place => {
    const chart = page.charts[Number(place.dataset.chart)];
    const curves = chart.curves.map(curve => ({...curve, y: KEPT.even && curve.even || curve.y, across: curve.x.map(step => onAxis(curve.run, KEPT.axis, step))}));
    return {place, chart, curves, log: KEPT.log.get(place.dataset.title) ?? chart.log};
  });
  const range = extent();
  for (const plot of plots) build(plot, range);
}

function build(plot, [first, last]) {
  const {place, chart, curves, log} = plot, css = style();
  const ink = css.getPropertyValue('--soft'), grid = css.getPropertyValue('--grid');
  const data = uPlot.join(curves.map(curve => [curve.across, curve.y.map(y => log && y <= 0 ? null : y)]));
  const tip = make('div', 'tip'), many = curves.length > 50;
  const size = () => ({width: place.clientWidth, height: place.clientHeight});
  const axis = (label, more) => ({stroke: ink, label, labelSize: 18, labelGap: 0, labelFont: '12px system-ui, sans-serif',
    font: '12px system-ui, sans-serif', grid: {stroke: grid, width: 1}, ticks: {stroke: grid, size: 4}, ...more});
  const up = (u, low, high) => {
    if (low == null) return log ? [1, 10] : [0, 1];  // nothing is shown
    if (log) return [low / 1.1, high * 1.1];
    if (chart.zero && low >= 0) return [0, high * 1.08 || 1];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low - margin, high + margin];
  };
  const u = plot.u = new uPlot({
    ...size(),
    legend: {show: false},
    scales: {x: {time: false, min: first, max: last, range: (u, low, high) => [low, high]},
      y: {distr: log ? 3 : 1, range: up}},
    axes: [axis(page.axes[KEPT.axis], {size: 28, ...(KEPT.axis === 0 ? {incrs: WHOLE} : {}), values: (u, ticks) => ticks.map(tick => tick == null ? '' : short(tick))}),
      axis(chart.up, {size: (u, texts) => 14 + 7 * Math.max(3, ...(texts ?? []).map(text => text.length)), values: (u, ticks) => ticks.map(tick => tick == null ? '' : short(tick))})],
    series: [{}, ...curves.map(curve => {
      const stroke = colour(curve, css), dots = curve.style === 'dots' || curve.x.length < 2;
      return {label: curve.label, stroke, width: curve.style === 'raw' || many ? 1 : 2, dash: dashes(curve), show: !hidden(curve),
        alpha: curve.style === 'raw' ? 0.4 : 1, points: {show: dots, size: 8, fill: stroke}};
    })],
    cursor: {sync: {key: 'all', setSeries: false}, y: false, drag: {setScale: false, x: true, y: false}, focus: {prox: -1},
      bind: {dblclick: () => () => { zoomTo(null); return null; }},
      dataIdx: (u, at, index) => at === 0 ? index
        : bisect(data[0], curves[at - 1].across[nearest(curves[at - 1].across, data[0][index])]),
      points: {show: (u, at) => !many && curves[at - 1].style !== 'raw' && curves[at - 1].style !== 'level'}},
    hooks: {
      setSelect: [u => {
        if (u.select.width < 8) return;
        zoomTo(u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x'));
        u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
      }],
      setCursor: [u => tell(plot, tip)],
    },
  }, data, place);
  u.over.append(tip);
  touch(u, place);
  plot.watch = new ResizeObserver(() => u.setSize(size()));
  plot.watch.observe(place);
}

// The values at the cursor, of the chart under the pointer or with the focus.
function tell({u, place, curves}, tip) {
  const left = u?.cursor.left ?? -1;
  if (left < 0 || !(place.matches(':hover') || place.contains(document.activeElement))) { tip.style.display = 'none'; return; }
  const x = u.posToVal(left, 'x'), shown = curves.filter((curve, at) => u.series[at + 1].show);
  if (shadeOf) shown.reverse();  // the best is drawn last
  if (!shown.length) return;
  const near = shown.map(curve => ({curve, at: nearest(curve.across, x)}));
  const anchor = near.filter(({curve}) => curve.style !== 'level')
    .reduce((a, b) => !a || Math.abs(b.curve.across[b.at] - x) < Math.abs(a.curve.across[a.at] - x) ? b : a, null) ?? near[0];
  const step = anchor.curve.x[anchor.at], css = style(), row = (mark, text, value) => {
    const line = make('div', '');
    line.append(...mark, make('span', '', text), make('span', 'value', value));
    return line;
  };
  tip.replaceChildren(...page.axes.map((name, axis) => row([], name, whole(onAxis(anchor.curve.run, axis, step), axis))),
    ...near.slice(0, 16).map(({curve, at}) => {
      const mark = make('i', 'swatch ' + curve.style), other = curve.x[at] !== step && curve.style !== 'level';
      mark.style.color = colour(curve, css);
      return row([mark], curve.label + (other ? ` (step ${curve.x[at].toLocaleString('en')})` : ''), short(curve.y[at]));
    }));
  tip.style.display = 'block';
  const room = u.over.clientWidth, beside = left > room / 2 ? left - tip.offsetWidth - 12 : left + 12;
  tip.style.left = Math.max(0, Math.min(beside, room - tip.offsetWidth)) + 'px';
}

// A finger drags a stretch as the mouse does; up and down it still scrolls the page.
function touch(u, place) {
  let from = null;
  const at = event => Math.min(Math.max(event.clientX - u.over.getBoundingClientRect().left, 0), u.over.clientWidth);
  u.over.addEventListener('pointerdown', event => {
    if (event.pointerType === 'mouse') return;
    from = at(event);
    place.focus({preventScroll: true});
    u.setCursor({left: from, top: 10});
  });
  u.over.addEventListener('pointermove', event => {
    if (from === null) return;
    const to = at(event);
    u.setCursor({left: to, top: 10});
    u.setSelect({left: Math.min(from, to), top: 0, width: Math.abs(to - from), height: u.over.clientHeight}, false);
  });
  u.over.addEventListener('pointerup', () => { if (from !== null) u.setSelect({...u.select}); from = null; });
  u.over.addEventListener('pointercancel', () => { from = null; });
}

function keyboard({u, place}, event) {
  const [low, high] = [u.scales.x.min, u.scales.x.max], width = u.over.clientWidth;
  const left = u.cursor.left >= 0 ? u.cursor.left : width / 2, here = u.posToVal(left, 'x');
  const move = to => u.setCursor({left: Math.min(Math.max(to, 0), width), top: 10});
  const scale = by => zoomTo(here - (here - low) * by, here + (high - here) * by);
  const act = {ArrowLeft: () => move(left - width / 50), ArrowRight: () => move(left + width / 50), Home: () => move(0),
    End: () => move(width), '+': () => scale(0.5), '=': () => scale(0.5), '-': () => KEPT.zoom && scale(2),
    0: () => zoomTo(null), Escape: () => { zoomTo(null); u.setCursor({left: -10, top: -10}); }}[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
  place.querySelector('.tip').setAttribute('aria-live', 'polite');
}

// Swatches show a curve's dashes as well as its colour.
function swatches() {
  for (const mark of all('svg.swatch line')) {
    mark.setAttribute('stroke-dasharray', dashes(mark.dataset).join(' '));
  }
}

// Rows by a column's values; what was not measured comes last either way.
function sortRuns() {
  const table = document.querySelector('table.runs');
  if (!table || !KEPT.sort) return;
  const [column, sign] = KEPT.sort, body = table.tBodies[0];
  const value = row => row.cells[column].dataset.sort;
  const order = (a, b) => a === '' || b === '' ? (a === '') - (b === '')
    : sign * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
  all('th', table).forEach((head, at) => {
    head.setAttribute('aria-sort', at !== column ? 'none' : sign > 0 ? 'ascending' : 'descending');
  });
}

function start() {
  page = JSON.parse(document.getElementById('data').textContent);
  const select = document.getElementById('axis'), even = document.getElementById('even');
  if (even) even.checked = KEPT.even;
  select?.replaceChildren(...page.axes.map((name, at) => new Option(name, at, false, at === KEPT.axis)));
  for (const tools of all('.tools')) tools.hidden = false;
  swatches();
  for (const button of all('button.key')) button.setAttribute('aria-pressed', button.dataset.keys.split(' ').some(key => !KEPT.off.has(key)));
  for (const box of all('input.log')) {
    box.checked = KEPT.log.get(box.dataset.title) ?? page.charts[Number(box.dataset.chart)].log;
  }
  sortRuns();
  for (const more of STARTS) more();
  draw();
  zoomTo(...(KEPT.zoom ?? [null]));
}

document.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (button?.matches('.reset')) zoomTo(null);
  if (button?.matches('.sort')) {
    const column = button.closest('th').cellIndex;
    KEPT.sort = [column, KEPT.sort?.[0] === column ? -KEPT.sort[1] : 1];
    sortRuns();
  }
  if (button?.matches('.key')) {
    const keys = button.dataset.keys.split(' '), off = keys.some(key => !KEPT.off.has(key));
    for (const key of keys) if (off) KEPT.off.add(key); else KEPT.off.delete(key);
    for (const same of all('button.key')) {
      same.setAttribute('aria-pressed', same.dataset.keys.split(' ').some(key => !KEPT.off.has(key)));
    }
    switchCurves();
  }
});
function switchCurves() {
  for (const {u, curves} of plots) u.batch(() => curves.forEach((curve, at) => {
    if (u.series[at + 1].show === hidden(curve)) u.setSeries(at + 1, {show: !hidden(curve)});
  }));
}
document.addEventListener('change', event => {
  if (event.target.id === 'axis') {
    KEPT.axis = Number(event.target.value);
    KEPT.zoom = null;
    draw();
    zoomTo(null);
  }
  if (event.target.id === 'even') {
    KEPT.even = event.target.checked;
    draw();
  }
  if (event.target.matches('input.log')) {
    KEPT.log.set(event.target.dataset.title, event.target.checked);
    draw();
  }
});
document.addEventListener('keydown', event => {
  const plot = plots.find(({place}) => place === event.target);
  if (plot) keyboard(plot, event);
});

// A page that `report --watch` serves asks for itself again; what the reader chose and opened stays.
const LOOK_MS = 2000, REST = 10, FOCUSABLE = 'a, button, select, input, summary, .plot';
let pressed = false;
addEventListener('pointerdown', () => { pressed = true; });
addEventListener('pointerup', () => { pressed = false; });
async function look() {
  const main = document.querySelector('main'), began = performance.now();
  try {
    const answer = await fetch(location.href, {headers: {'If-None-Match': main.dataset.watched}});
    if (answer.status === 200 && !pressed) show(main, new DOMParser().parseFromString(await answer.text(), 'text/html'));
    else if (!answer.ok && answer.status !== 304) throw new Error(answer.statusText);
  } catch {
    document.querySelector('.live').textContent = 'The server does not answer: this page shows its last answer.';
  }
  setTimeout(look, Math.max(LOOK_MS, REST * (performance.now() - began)));  // training has the machine
}
function show(main, page) {
  const open = new Map(all('details').map(one => [one.id, one.open]));
  const focus = all(FOCUSABLE).indexOf(document.activeElement);
  const under = plots.findIndex(({place}) => place.matches(':hover') || place === document.activeElement);
  const {left, top} = plots[under]?.u.cursor ?? {};
  main.replaceWith(document.adoptNode(page.querySelector('main')));
  for (const one of all('details')) one.open = open.get(one.id) ?? one.open;
  start();
  all(FOCUSABLE)[focus]?.focus({preventScroll: true});
  if (left >= 0) plots[under]?.u.setCursor({left, top});
}

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
document.addEventListener('DOMContentLoaded', start);  // when all of the page's scripts are there
if (document.querySelector('main').dataset.watched) setTimeout(look, LOOK_MS);
