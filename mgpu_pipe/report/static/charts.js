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
