package document

import "strings"

// DidYouMean returns a clause, "; did you mean …?", that names the candidate
// nearest to text, or "" if none is near.
func DidYouMean(text string, candidates []string) string {
	if nearest := Nearest(text, candidates); nearest != "" {
		return "; did you mean " + nearest + "?"
	}
	return ""
}

// Instead returns that clause, or one that lists all candidates.
func Instead(text string, candidates []string) string {
	if meant := DidYouMean(text, candidates); meant != "" {
		return meant
	}
	return "; write " + OneOf(candidates)
}

// OneOf joins alternatives, of which there is one at least, as a sentence does.
func OneOf(texts []string) string {
	last := len(texts) - 1
	if last == 0 {
		return texts[0]
	}
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}

// Nearest returns the candidate that text was likely meant to be, or "".
func Nearest(text string, candidates []string) string {
	best, bestDistance := "", 3
	for _, c := range candidates {
		if d := Distance(strings.ToLower(text), strings.ToLower(c)); d < bestDistance && d <= len(c)/2 {
			best, bestDistance = c, d
		}
	}
	return best
}

// Distance is the Levenshtein distance of two strings.
func Distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
