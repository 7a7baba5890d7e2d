package sqlstore

// UnderWay is how many statements of a kind run at once before others queue.
const UnderWay = underWay
